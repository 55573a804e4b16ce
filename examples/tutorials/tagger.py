# tagger.py
import torch
from torch import nn
from torch.nn import functional as F


def mask_of(tokens):
    """Which positions each position may attend to: earlier ones that are in use."""
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    in_use = (tokens != 0).any(dim=0)
    return causal & in_use


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*split, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Tagger(nn.Module):
    def __init__(self, words=64, width=32, layers=4):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens):
        x, mask = self.embedding(tokens), mask_of(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)

def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(seed, rows=16, length=32):
    """Tokens and labels, int64 [rows, length]: each label is the sum of the row's tokens so far, modulo 64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (rows, length), generator=generator)
    starts = length - torch.randint(4, length + 1, (rows, 1), generator=generator).sort(dim=0).values
    padding = torch.arange(length) < starts
    tokens = tokens.masked_fill(padding, 0)
    return tokens, (tokens.cumsum(1) % 64).masked_fill(padding, -100)
