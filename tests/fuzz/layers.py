"""Small models of layers of many kinds, for tests/fuzz/combinations.py.

Contract: `Mixed(kinds)` has an embedding, one layer of each kind and a head, always with the same parameters; each layer keeps
the shape [rows, length, WIDTH]. Layers of `DRAWS` draw random numbers, those of `ROUNDED` are other kernels in a trace than in
eager, and those of `TIED` share a parameter with another module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB = 8, 11
DRAWS, ROUNDED, TIED = {"dropout"}, {"gru"}, {"tied", "shared", "head"}


class Square(torch.autograd.Function):
    """A backward that autograd would not derive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] * grad


def positions(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    return torch.where((tokens > 5)[..., None], x, layer.linear(x) + layer.part(tokens))


def counting(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    if layer.training:
        layer.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        layer.count += 1
    return x + layer.linear(x - layer.mean)


def attention(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in layer.part(x).chunk(3, -1))
    return x + layer.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def experts(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    """Each expert takes so many rows as the data decide."""
    rows = x.flatten(0, 1)
    weights, chosen = layer.linear(rows)[:, :3].softmax(-1).max(-1)
    out = torch.zeros_like(rows)
    for index, expert in enumerate(layer.part):
        (own,) = torch.where(chosen == index)
        out = out.index_add(0, own, expert(rows[own]) * weights[own, None])
    return x + out.view_as(x)


def low(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.linear(x)
    return x + y.to(x.dtype)


def through(layer: Any, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
    return x + layer.linear(layer.part(x.flatten(0, 1)).view_as(x))


FORWARDS: dict[str, Callable[..., Any]] = {
    "plain": lambda layer, x, *_: x + torch.tanh(layer.linear(x)),
    "skip": lambda layer, x, first, *_: x + layer.linear(first),
    "positions": positions,
    "counting": counting,
    "gru": lambda layer, x, *_: layer.linear(layer.part(x)[0]),
    "conv": lambda layer, x, *_: x + layer.linear(F.gelu(layer.part(x.transpose(1, 2))).transpose(1, 2)),
    "attention": attention,
    "experts": experts,
    "checkpoint": lambda m, x, *_: x + checkpoint(lambda y: torch.tanh(m.linear(torch.sin(y))), x, use_reentrant=False),
    "low": low,
    "custom": lambda layer, x, *_: x + Square.apply(torch.tanh(layer.linear(x))),  # type: ignore[no-untyped-call]
    "unused": lambda layer, x, *_: x + layer.linear(x @ layer.turn.to(x.dtype)),
    "norm": through,
    "statistics": through,
    "dropout": through,
    "frozen": lambda layer, x, *_: x + torch.tanh(layer.linear(x)),
}
PARTS: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: nn.Embedding(VOCAB, WIDTH),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "attention": lambda: nn.Linear(WIDTH, 3 * WIDTH),
    "experts": lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "statistics": lambda: nn.BatchNorm1d(WIDTH, momentum=0.3),
    "dropout": lambda: nn.Dropout(0.3),
    "unused": lambda: nn.Linear(2, 2),
}
BUFFERS = {"counting": {"mean": torch.zeros(WIDTH), "count": torch.tensor(0)}, "unused": {"turn": torch.eye(WIDTH).flip(0)}}
KINDS = (*FORWARDS, *sorted(TIED))


class Layer(nn.Module):
    """A linear layer, and what its kind adds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.part = PARTS.get(kind, nn.Identity)()
        for name, buffer in BUFFERS.get(kind, {}).items():
            self.register_buffer(name, buffer.clone())
        self.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
        return FORWARDS[self.kind](self, x, first, tokens)


class Twice(nn.Module):
    """Calls a layer that the model has elsewhere, twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, first: Tensor, tokens: Tensor) -> Any:
        return self.inner(self.inner(x, first, tokens), first, tokens)


class Mixed(nn.Module):
    """Tokens to logits. "tied": a plain layer with the first layer's weight; "shared": the whole first layer; "head": a plain
    layer, and the head has the weight of the embedding."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, layers = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), list[Any]()
        for kind in kinds:
            layers.append(Twice(layers[0]) if layers and kind == "shared" else Layer(kind if kind in FORWARDS else "plain"))
            if kind == "tied":
                layers[-1].linear.weight = layers[0].linear.weight
        self.layers = nn.ModuleList(layers)
        if "head" in kinds:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Any = None, scale: Any = None, factor: float | None = None) -> Any:
        first = x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, first, tokens)
            first = first if index else x
            if index == len(self.layers) // 2:
                x = x if mask is None else x.masked_fill(mask[..., None], 0.0)
                x = x if factor is None else x * factor
        return self.head(x if scale is None else x * scale)
