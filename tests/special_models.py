"""Small models that are each odd in one way: what a pipeline must get right beyond a plain stack of layers.

Contract: `SPECIAL[name](seed)` is a `Case` as in `tests.models`; every model has four `layers`, `CUTS[stages]` are the
modules at which stages 1.. begin, and 24 rows. Models of `DEEP` have eight layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import CLASSES, ROWS, VOCAB, Batch, Case

WIDTH = 8
CUTS = {1: None, 2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}


class Plain(nn.Module):
    """Four linear layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Norms(Plain):
    """A BatchNorm in every layer: running statistics that each microbatch writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3)) for _ in range(4)
        )


class Skip(Plain):
    """The first layer's output is read again by the last one."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = torch.tanh(layer(x))
        return self.head(self.layers[3](x) * first)


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Block(nn.Module):
    """A weight used twice, with another one between; a norm whose weight gradient comes with its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.twice, self.between = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(F.silu(self.between(self.twice(self.norm(x)))))


class Deep(nn.Module):
    """Eight blocks between an embedding and a head; embedding and first blocks may be frozen."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Block() for _ in range(8))
        for part in (self.embed, *self.layers)[: frozen and frozen + 1]:
            part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Masked(Plain):
    """A mask that only layer 2 reads, and in layer 3 two tensors without batch dimension (one looks as if it had)."""

    def forward(self, x: Tensor, *, mask: Tensor, scale: tuple[Tensor], table: tuple[Tensor]) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        x = torch.tanh(self.layers[2](x).masked_fill(mask, 0.0))
        return self.head(self.layers[3](x) * scale[0] + table[0].mean(0))


class Partial(Plain):
    """`spare` is never called, layer 1 is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.layers[1].requires_grad_(False)


class Several(Plain):
    """Returns a structure: tensors with and without batch dimension, a number, None."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"logits": y, "more": (y.argmax(1), y.mean(), [3, None])}


def _vectors(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def _plain(kind: type[nn.Module]) -> Callable[..., Case]:
    def make(seed: int = 0) -> Case:
        torch.manual_seed(0)
        x, classes = _vectors(seed)
        return Case(kind(), F.cross_entropy, Batch((x,), {}, classes))

    return make


def tied(seed: int = 0) -> Case:
    """Next-token prediction with a tied head."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, 5), generator=torch.Generator().manual_seed(seed))
    return Case(Tied(), token_loss, Batch((tokens,), {}, tokens))


def _deep(frozen: int) -> Callable[..., Case]:
    def make(seed: int = 0) -> Case:
        torch.manual_seed(0)
        tokens = torch.randint(VOCAB, (ROWS, 4), generator=torch.Generator().manual_seed(seed))
        return Case(Deep(frozen), token_loss, Batch((tokens,), {}, tokens.roll(1, 1)))

    return make


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def masked(seed: int = 0) -> Case:
    """With keyword arguments; `table` has as many rows as the batch, and is to be passed whole all the same."""
    torch.manual_seed(0)
    x, classes = _vectors(seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.5
    scale, table = torch.randn(WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    # In tuples, which the reference does not cut.
    return Case(Masked(), F.cross_entropy, Batch((x,), {"mask": mask, "scale": (scale,), "table": (table,)}, classes))


def several(seed: int = 0) -> Case:
    """The loss reads one entry of a dict."""
    torch.manual_seed(0)
    x, classes = _vectors(seed)
    return Case(Several(), lambda output, target: F.cross_entropy(output["logits"], target), Batch((x,), {}, classes))


SPECIAL: dict[str, Callable[..., Case]] = {
    "plain": _plain(Plain),
    "norms": _plain(Norms),
    "skip": _plain(Skip),
    "partial": _plain(Partial),
    "tied": tied,
    "masked": masked,
    "several": several,
}
DEEP = {"deep": _deep(0), "deep, 2 frozen": _deep(2), "deep, 5 frozen": _deep(5)}
