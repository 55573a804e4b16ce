"""A small mixture of experts whose experts are spread over the ranks of a process group: one expert on each rank.

Each expert takes the tokens that want it most (expert choice), an equal number from each rank, so that shapes are fixed:
`[rows, dim]` in and out. Values go to the experts and back with functional collectives, which autograd knows.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F


class Experts(nn.Module):
    """A layer: route, send to the experts, compute, send back, add."""

    def __init__(self, dim: int, group: dist.ProcessGroup, hidden: int | None = None) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.router = nn.Linear(dim, self.ranks)
        self.up = nn.Linear(dim, hidden or 2 * dim)
        self.down = nn.Linear(hidden or 2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        h = self.norm(x)
        weight, chosen = torch.softmax(self.router(h), -1).topk(len(x) // self.ranks, dim=0)  # [tokens, experts]
        rows, weight = chosen.t().reshape(-1), weight.t().reshape(-1, 1)
        mine = self.exchange(h[rows])
        back = self.exchange(self.down(F.gelu(self.up(mine))))
        return x.index_add(0, rows, back * weight)

    def exchange(self, x: Tensor) -> Tensor:
        return collectives.all_to_all_single_autograd(x, None, None, self.group)


class MoE(nn.Module):
    """Layers of experts and a head. Ranks start with the same numbers but in the experts."""

    def __init__(self, group: dist.ProcessGroup, dim: int = 8, layers: int = 4, hidden: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts(dim, group, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, 4)
        torch.manual_seed(1 + dist.get_rank(group))
        with torch.no_grad():
            for layer in self.layers:
                layer.up.weight.add_(0.1 * torch.randn_like(layer.up.weight))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(rank: int, rows: int = 24, dim: int = 8) -> tuple[Tensor, Tensor]:
    """A rank's own rows and targets."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(rows, dim, generator=generator), torch.randint(4, (rows,), generator=generator)
