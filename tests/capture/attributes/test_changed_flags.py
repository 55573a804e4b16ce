"""Flags in attributes that a forward changes: refused if the second call computes other values than the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Flagged(nn.Module):
    """Two layers, and flags that subclasses change between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ready, self.mode, self.kinds = False, "start", {"warm": None}
        self.register_buffer("mean", torch.zeros(4))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class InitialisedOnce(Flagged):
    def between(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mean.copy_(x.detach().mean(0))
            self.ready = True
        return x - self.mean


class FlipFlop(Flagged):
    def between(self, x: Tensor) -> Tensor:
        self.ready = not self.ready
        return x * 2 if self.ready else x


class ByText(Flagged):
    def between(self, x: Tensor) -> Tensor:
        before, self.mode = self.mode, "warm"
        return torch.tanh(x) if before == "start" else x


class InADict(Flagged):
    def between(self, x: Tensor) -> Tensor:
        before, self.kinds["warm"] = self.kinds["warm"], True
        return x if before else torch.tanh(x)


class Raising(Flagged):
    def between(self, x: Tensor) -> Tensor:
        if self.ready:
            raise RuntimeError("called twice")
        self.ready = True
        return x


def trained(model: nn.Module) -> list[float]:
    """The losses of two steps."""
    pipe = graphpp.compile(model, F.mse_loss, split=["second"], microbatches=2)
    return [float(pipe.step(X, target=X).loss.detach()) for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "flag"),
    [(InitialisedOnce, "ready"), (FlipFlop, "ready"), (ByText, "mode"), (InADict, "kinds.warm"), (Raising, "ready")],
)
def test_a_flag_that_decides_is_refused(kind: type[Flagged], flag: str) -> None:
    model = kind()
    with pytest.raises(graphpp.CaptureError, match=f"(?s)changes {flag}.*run the forward once before"):
        trained(model)
    assert (model.ready, model.mode, model.kinds) == (False, "start", {"warm": None})


class OnlyNoted(Flagged):
    def between(self, x: Tensor) -> Tensor:
        self.ready, self.mode = True, "ran"
        return x


class Cached(Flagged):
    """A cache that the first call makes, and a flag that says so."""

    scale: Any = None

    def between(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale = torch.linspace(1, 2, 4)
            self.ready = True
        return x * self.scale


@pytest.mark.parametrize(("kind", "ready"), [(OnlyNoted, True), (Cached, False)])
def test_a_flag_that_decides_nothing_is_accepted(kind: type[Flagged], ready: bool) -> None:
    model, plain = kind(), kind()
    expected = float(torch.stack([F.mse_loss(plain(part), part) for part in X.split(3)]).mean().detach())
    assert trained(model) == pytest.approx([expected] * 2, rel=1e-6)
    assert model.ready is ready


class Kept(Flagged):
    """Attributes, a buffer and containers that have no tensor before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self.held: Any = None
        self.table, self.listed = dict[Any, Tensor](), list[Tensor]()


class BiasBySize(Kept):
    """As the ALiBi of x-transformers: a buffer that grows with the input."""

    def between(self, x: Tensor) -> Tensor:
        if self.bias is None or self.bias.shape[0] < len(x):
            self.register_buffer("bias", torch.arange(float(len(x)))[:, None], persistent=False)
        return x - self.bias[: len(x)]


class TablesOfBuffers(Kept):
    def between(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = (self.mean + torch.arange(4.0)).cos(), self.mean.exp()
        if len(x) not in self.table:
            self.table[len(x)] = torch.arange(float(len(x)))[:, None]
        return x * self.held[0] + self.held[1] * self.table[len(x)]


class Overwritten(Kept):
    """Leaves tensors of the call that only this call reads."""

    def between(self, x: Tensor) -> Tensor:
        self.held, self.table["last"], self.bias = (x, x.mean()), x.sum(0), x.mean(0).detach()
        self.listed.clear()
        self.listed += [x.sum(), x.mean()]
        return x + self.held[1] + self.table["last"] + self.bias + sum(self.listed)


class Appended(Kept):
    def between(self, x: Tensor) -> Tensor:
        self.listed.append(x.detach())
        return x


class Average(Kept):
    def between(self, x: Tensor) -> Tensor:
        self.held = x.mean() if self.held is None else (x.mean() + self.held) / 2
        return x - self.held


class FirstInABuffer(Kept):
    def between(self, x: Tensor) -> Tensor:
        self.bias = x.mean(0).detach() if self.bias is None else self.bias
        return x - self.bias


class FirstByAFlag(Kept):
    def between(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.held, self.ready = x.mean(0), True
        return x - self.held


class FirstInADict(Kept):
    def between(self, x: Tensor) -> Tensor:
        return x - self.table.setdefault("first", x.mean(0))


class Sum(Kept):
    def between(self, x: Tensor) -> Tensor:
        self.listed.append(x.mean(0))
        return x - sum(self.listed)


class OneDraw(Kept):
    def between(self, x: Tensor) -> Tensor:
        self.held = torch.randn(4) if self.held is None else self.held
        return x * self.held


class FirstLength(Kept):
    def between(self, x: Tensor) -> Tensor:
        before, self.held = self.held, 0.5
        return x if before is None else x * before


@pytest.mark.parametrize("kind", [BiasBySize, TablesOfBuffers, Overwritten, Appended])
def test_a_cache_and_an_overwritten_tensor_are_accepted(kind: type[Kept]) -> None:
    model, plain = kind(), kind()
    expected = float(torch.stack([F.mse_loss(plain(part), part) for part in X.split(3)]).mean().detach())
    assert trained(model) == pytest.approx([expected] * 2, rel=1e-6)
    assert (model.bias, model.held, model.table, model.listed) == (None, None, {}, [])


@pytest.mark.parametrize(
    ("kind", "place"),
    [(Average, "held"), (FirstInABuffer, "bias"), (FirstByAFlag, "held"), (FirstInADict, "table.first"), (Sum, "listed.0"),
     (OneDraw, "held"), (FirstLength, "held")],
)  # fmt: skip
def test_a_value_that_the_next_call_reads_is_refused(kind: type[Kept], place: str) -> None:
    model = kind()
    with pytest.raises(graphpp.CaptureError, match=f"(?s) {place}.*run the forward once before"):
        trained(model)
    assert (model.bias, model.held, model.table, model.listed) == (None, None, {}, [])
