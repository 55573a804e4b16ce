"""The operations that random programs are made of: each a small module with the kinds of what it reads and makes.

Contract: a kind is one letter, and every operation takes any values of its kinds (B rows, T tokens, D numbers):

    h  float32 [B, T, D]             c  float32 [B, T, D/2], mostly a view     p  float32 [B, D, T], a transposed view
    m  bool, broadcasts to h         i  int64 [B, T] below D                   s  float32 []
    z  complex64 [B, T, D/2]         b  bfloat16 [B, T, D]                     o  float32 [B, T, 0]
    a  bool [T, T], attention mask

`MAKERS[kind]` makes a value of a kind from an h where a program has none yet. An operation whose module has a parameter
`weight` [D, D] can share it with any other such. `WRITES` names those that write buffers, `DRAWS` those that draw
random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

T, D, HEADS = 4, 8, 2

Maker = Callable[[Tensor], Tensor]
MAKERS: dict[str, Maker] = {
    "c": lambda h: h[..., ::2],
    "p": lambda h: h.transpose(1, 2),
    "m": lambda h: h > 0,
    "i": lambda h: h.argmax(-1),
    "s": lambda h: h.mean(),
    "z": lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()),
    "b": lambda h: h.bfloat16(),
    "o": lambda h: h[..., :0],
    "a": lambda h: torch.ones(T, T, dtype=torch.bool).tril(),
}


class Pure(nn.Module):
    """A function without parameters, as a module, so that a cut can name its call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


class Halved(torch.autograd.Function):
    """A function whose backward is its own: half of the gradient, whatever the forward does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return torch.sin(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class Attention(nn.Module):
    """Self-attention over an optional mask; the output projection has the `weight` that ties share."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)
        self.causal = causal

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.weight)


class Convolution(nn.Module):
    """A 1-dim convolution along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


class BatchNorm(nn.Module):
    """BatchNorm over the channels; writes three buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


class RMSNorm(nn.Module):
    """A norm written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.gain


class RunningMean(nn.Module):
    """A mean kept by hand: written in place, and read after the write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean((0, 1)))
            self.count += 1
        return h - self.mean


class Delayed(nn.Module):
    """A state that is read, through a view, before it is replaced: the backward needs the old value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(0.5, 1.5, D))

    def forward(self, h: Tensor) -> Tensor:
        seen = h * self.state.view(1, 1, D)
        self.state = (0.5 * self.state + 0.5 * h.detach().mean((0, 1))).detach()
        return seen


class Shift(nn.Module):
    """Two buffers handed on from one microbatch to the next: what is written into one was in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.ones(D))
        self.register_buffer("last", torch.zeros(D))

    def forward(self, h: Tensor) -> Tensor:
        seen = h + self.before
        self.before = self.last
        self.last = h.detach().mean((0, 1))
        return seen


class Table(nn.Module):
    """A buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, T * D).view(T, D), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.cos(self.table)


class Projection(nn.Module):
    """A linear map whose weight is not transposed: its gradient has another memory order than a linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.weight


class Blend(nn.Module):
    """Two parameters that are added: their gradients are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.rand(T, D)), nn.Parameter(torch.rand(T, D))

    def forward(self, h: Tensor) -> Tensor:
        return h * (self.one + self.two)


def mix(h: Tensor, p: Tensor) -> Tensor:
    """A product of two activations."""
    return torch.softmax(h @ p, -1) @ h


def edited(h: Tensor) -> Tensor:
    """Writes into a value of its own."""
    copy = h.clone()
    copy.mul_(1.5)
    copy[:, 0] = 0.25
    return copy


def route(h: Tensor) -> Tensor:
    """Keep the largest three of the D numbers, as a router does."""
    top = h.softmax(-1).topk(3, -1)
    return torch.zeros_like(h).scatter(-1, top.indices, top.values)


def spread(h: Tensor) -> Tensor:
    """A value that stands only once in memory for all tokens."""
    return h.mean(1, keepdim=True).expand(-1, T, -1)


def positions(h: Tensor) -> Tensor:
    """Reads values that depend on no input."""
    angle = torch.arange(T, dtype=torch.float32)[:, None] / torch.arange(1, D + 1)
    return h * angle.cos() + angle.sin()


def rotate(z: Tensor) -> Tensor:
    """Rotary positions on complex numbers."""
    angle = torch.arange(T, dtype=torch.float32)[:, None] / torch.arange(1, D // 2 + 1)
    return z * torch.polar(torch.ones_like(angle), angle)


def unlearned(h: Tensor) -> Tensor:
    """A part without gradient inside."""
    with torch.no_grad():
        scale = h.abs().amax() + 1
    return h / scale


def autocast(h: Tensor, p: Tensor) -> Tensor:
    """A product in bfloat16 by autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h @ p @ h).float()


def pure(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Makes modules that call `function`."""
    return lambda: Pure(function)


def linear() -> nn.Module:
    return nn.Linear(D, D)


@dataclass(frozen=True)
class Operation:
    """What an operation reads and makes (one letter a value), and how its module is made."""

    sources: str
    results: str
    make: Callable[[], nn.Module]


OPERATIONS: dict[str, Operation] = {
    "linear": Operation("h", "h", linear),
    "projection": Operation("h", "h", Projection),
    "blend": Operation("h", "h", Blend),
    "embedding": Operation("i", "h", lambda: nn.Embedding(D, D)),
    "padded_embedding": Operation("i", "h", lambda: nn.Embedding(D, D, padding_idx=0)),
    "norm": Operation("h", "h", lambda: nn.LayerNorm(D)),
    "rms": Operation("h", "h", RMSNorm),
    "attention": Operation("h", "h", Attention),
    "causal": Operation("h", "h", lambda: Attention(causal=True)),
    "masked_attention": Operation("ha", "h", Attention),
    "conv": Operation("h", "h", Convolution),
    "batch_norm": Operation("h", "h", BatchNorm),
    "running_mean": Operation("h", "h", RunningMean),
    "delayed": Operation("h", "h", Delayed),
    "shift": Operation("h", "h", Shift),
    "table": Operation("h", "h", Table),
    "add": Operation("hh", "h", pure(torch.add)),
    "mul": Operation("hh", "h", pure(torch.mul)),
    "gelu": Operation("h", "h", pure(F.gelu)),
    "halved": Operation("h", "h", pure(Halved.apply)),
    "relu": Operation("h", "h", pure(torch.relu)),
    "tanh": Operation("h", "h", pure(torch.tanh)),
    "softplus": Operation("h", "h", pure(F.softplus)),
    "softmax": Operation("h", "h", pure(lambda h: h.softmax(-1))),
    "detach": Operation("h", "h", pure(torch.detach)),
    "dropout": Operation("h", "h", lambda: nn.Dropout(0.3)),
    "identity": Operation("h", "h", nn.Identity),
    "edited": Operation("h", "h", pure(edited)),
    "route": Operation("h", "h", pure(route)),
    "spread": Operation("h", "h", pure(spread)),
    "flip": Operation("h", "h", pure(lambda h: h.flip(1))),
    "sort": Operation("h", "h", pure(lambda h: h.sort(-1).values)),
    "cumsum": Operation("h", "h", pure(lambda h: h.cumsum(1) / T)),
    "positions": Operation("h", "h", pure(positions)),
    "unlearned": Operation("h", "h", pure(unlearned)),
    "chunk": Operation("h", "cc", pure(lambda h: h.chunk(2, -1))),
    "strided": Operation("h", "c", pure(MAKERS["c"])),
    "cat": Operation("cc", "h", pure(lambda x, y: torch.cat((x, y), -1))),
    "swap": Operation("c", "c", pure(lambda c: c.flatten(0, 1).unflatten(0, (-1, T)) * 2)),
    "turn": Operation("c", "c", pure(lambda c: c.transpose(1, 2))),
    "transpose": Operation("h", "p", pure(MAKERS["p"])),
    "untranspose": Operation("p", "h", pure(lambda p: p.transpose(1, 2))),
    "exp": Operation("p", "p", pure(lambda p: torch.exp(-p * p))),
    "mix": Operation("hp", "h", pure(mix)),
    "autocast": Operation("hp", "h", pure(autocast)),
    "positive": Operation("h", "m", pure(MAKERS["m"])),
    "not": Operation("m", "m", pure(torch.logical_not)),
    "and": Operation("mm", "m", pure(torch.logical_and)),
    "where": Operation("mhh", "h", pure(torch.where)),
    "drop": Operation("hm", "h", pure(lambda h, m: h.masked_fill(m, 0.0))),
    "argmax": Operation("h", "i", pure(MAKERS["i"])),
    "next": Operation("i", "i", pure(lambda i: (i + 1) % D)),
    "one_hot": Operation("i", "h", pure(lambda i: F.one_hot(i, D).float())),
    "mean": Operation("h", "s", pure(MAKERS["s"])),
    "cross_entropy": Operation("hi", "s", pure(lambda h, i: F.cross_entropy(h.flatten(0, 1), i.flatten()))),
    "sum": Operation("ss", "s", pure(torch.add)),
    "scale": Operation("hs", "h", pure(torch.mul)),
    "complex": Operation("h", "z", pure(MAKERS["z"])),
    "rotate": Operation("z", "z", pure(rotate)),
    "conjugate": Operation("z", "z", pure(torch.conj)),
    "real": Operation("z", "h", pure(lambda z: torch.view_as_real(z.resolve_conj()).flatten(2))),
    "half": Operation("h", "b", pure(MAKERS["b"])),
    "half_gelu": Operation("b", "b", pure(F.gelu)),
    "float": Operation("b", "h", pure(lambda b: b.float())),
    "nothing": Operation("h", "o", pure(MAKERS["o"])),
    "join_nothing": Operation("ho", "h", pure(lambda h, o: torch.cat((o, h), -1))),
    "triangle": Operation("", "a", pure(lambda: torch.ones(T, T, dtype=torch.bool).tril())),
}

WRITES = ("batch_norm", "running_mean", "delayed", "shift")
DRAWS = ("dropout",)
WITH_PARAMETERS = (
    "linear", "projection", "blend", "embedding", "padded_embedding", "norm", "rms", "attention", "causal",
    "masked_attention", "conv",
)  # fmt: skip
WITH_STATE = (*WITH_PARAMETERS, "batch_norm", "running_mean", "delayed", "shift", "table")
