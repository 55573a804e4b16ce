"""Layers of the benchmarks' GPT-2, MoE, ViT and ResNet: attention, feed-forward, experts, residual blocks, embeddings, heads.

Contract
--------
- A `Stack` is a first module, equal layers one after the other, and a last module; each takes one tensor and
  returns one. `part(stack, start, end)` is a manual stage of the stack for torch: the same modules, none copied.
- All are plain PyTorch that torch.export captures and that torch's pipeline runs. Shapes do not depend on the data:
  `Experts` gives every expert a fixed number of places, as GShard does (Lepikhin et al. 2020, algorithm 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stack(nn.Module):
    """`last(layers(first(x)))`."""

    def __init__(self, first: nn.Module, layers: nn.ModuleList, last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, layers, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def part(model: Stack, start: int, end: int) -> Stack:
    """Layers `start` up to `end`, with the first module if `start` is 0, and the last module if `end` is the end."""
    first = model.first if start == 0 else nn.Identity()
    last = model.last if end == len(model.layers) else nn.Identity()
    return Stack(first, model.layers[start:end], last)


class Block(nn.Module):
    """Attention, then a feed-forward module: each normalised before, and added to its input with dropout."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), attention
        self.ffn_norm, self.feed_forward = nn.LayerNorm(dim), feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Attention(nn.Module):
    """Self-attention over [batch, length, dim], with dropout of its weights."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Two linear layers with a GELU between them, four times as wide."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Experts(nn.Module):
    """Each token goes to the `top` experts with its highest scores, weighted by softmax; experts run in batched products.

    An expert has places for `room` times its even share of the tokens of a microbatch, in order; it drops the tokens beyond
    its last place. Tokens travel to their places and back by products with one-hot masks.
    """

    def __init__(self, dim: int, hidden: int, experts: int = 8, top: int = 2, room: float = 1.25) -> None:
        super().__init__()
        self.top, self.room = top, room
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = self.places(tokens)
        sent = torch.einsum("tep,td->epd", (weights > 0).to(x.dtype), tokens)
        done = torch.bmm(F.gelu(torch.bmm(sent, self.up)), self.down)
        return torch.einsum("tep,epd->td", weights, done).view_as(x)

    def places(self, tokens: Tensor) -> Tensor:
        """The weight of each token at each place of each expert, [tokens, experts, places]; 0 elsewhere."""
        scores = F.softmax(self.router(tokens), -1)
        experts = scores.shape[1]
        weight, chosen = scores.topk(self.top, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        goes = chosen.flatten()[:, None] == torch.arange(experts, device=tokens.device)  # [tokens * top, experts]
        place = goes.long().cumsum(0) - 1
        room = torch.arange(int(self.room * len(goes) / experts), device=tokens.device)
        there = goes.unsqueeze(-1) & (place.unsqueeze(-1) == room)
        return (there.unflatten(0, (-1, self.top)) * weight[..., None, None]).sum(1)


class Words(nn.Module):
    """Token and position embedding: int64 [batch, length] -> [batch, length, dim]."""

    def __init__(self, vocab: int, length: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class Patches(nn.Module):
    """Images [batch, 3, side, side] -> [batch, 1 + patches, dim]: the class token, then the patches."""

    def __init__(self, side: int, patch: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, dim, patch, patch)
        self.of_class = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, dim))

    def forward(self, images: Tensor) -> Tensor:
        x = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat([self.of_class.expand(len(x), -1, -1), x], 1) + self.positions


class Head(nn.Module):
    """LayerNorm and a linear layer over all positions, or over the first position only."""

    def __init__(self, dim: int, classes: int, *, first: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.linear = first, nn.LayerNorm(dim), nn.Linear(dim, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x[:, 0] if self.first else x))


class Residual(nn.Module):
    """The basic block of a ResNet (He et al. 2015): two convolutions with batch norm, added to the input [batch, dim, h, w]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.BatchNorm2d(dim)
        self.second, self.second_norm = nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


class Pooled(nn.Module):
    """The mean over all places of an image, and a linear layer: [batch, dim, h, w] -> [batch, classes]."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))
