# network.py
import torch
from torch import nn
from torch.nn import functional as F


def batch(seed, rows=32, size=16):
    """Images [rows, 1, size, size], and the number of the direction of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows,), generator=generator)
    angles = (labels * torch.pi / 4)[:, None, None]
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    stripes = torch.sin(x * torch.cos(angles) + y * torch.sin(angles))
    noise = torch.randn(rows, size, size, generator=generator)
    return (stripes + noise)[:, None], labels


class Block(nn.Module):
    """Two convolutions with batch norm beside a skip connection."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(hidden)))


def network():
    torch.manual_seed(0)  # on every process: the same model
    blocks = [Block(16) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
