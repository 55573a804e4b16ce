"""The digest of the code and data that a model and a loss read changes with each of them, and not between processes."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import UserDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from graphpp.capture.transfer.digest import ModelDigest, UnreadableError

FACTOR = 2.0


def helped(x: Tensor) -> Tensor:
    return x * FACTOR


def twice(x: Tensor) -> Tensor:
    return x + x


def scaled(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean() * scale

    return loss


class Base(nn.Module):
    def finish(self, x: Tensor, extra: Any) -> Tensor:
        return x + 1


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.config = SimpleNamespace(depth=1, kinds={"a", "b", "c"}, nested={"eps": [1e-5]})
        self.table = torch.zeros(2)
        self.apply_at_end = functools.partial(helped)
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.config.nested["eps"][0] + len(self.config.kinds)
        return self.finish(self.apply_at_end(x) + self.table, self.extra)


def digest(model: nn.Module, loss: Any = None) -> bytes:
    return ModelDigest(model, loss).digest


def flag(model: Model) -> None:
    model.linear.in_features = 3  # the code of `nn.Linear` names it


def number(model: Model) -> None:
    model.config.nested["eps"][0] = 1e-6


def members(model: Model) -> None:
    model.config.kinds.add("d")


def table(model: Model) -> None:
    model.table[0] = 1


def hook(model: Model) -> None:
    model.linear.register_forward_hook(lambda module, inputs, output: output * 2)


def frozen(model: Model) -> None:
    model.linear.weight.requires_grad_(False)


def tied(model: Model) -> None:
    model.other = model.linear


@pytest.mark.parametrize("change", [flag, number, members, table, hook, frozen, tied])
def test_a_changed_model_has_another_digest(change: Callable[[Model], None]) -> None:
    model = Model()
    before = digest(model)
    assert digest(model) == before
    change(model)
    assert digest(model) != before


def test_code_that_the_forward_reaches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    seen = {digest(model), digest(model, scaled(1.0)), digest(model, scaled(2.0))}
    this = sys.modules[__name__]
    for owner, name, value in ((Base, "finish", Model.forward), (this, "FACTOR", 3.0), (this, "helped", twice)):
        monkeypatch.setattr(owner, name, value)
        seen.add(digest(Model()))
    assert len(seen) == 6


def test_values_of_parameters_do_not_count() -> None:
    one, other = Model(), Model()
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert digest(one) == digest(other)


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, hidden: int) -> None:
        self.__hidden, self.shown = hidden, 1


class Scaled(float):
    pass


class Kind(Enum):
    ONE = 1


class OtherKind(Enum):
    ONE = 2


PAIRS: list[tuple[Any, Any]] = [
    (torch.tanh, torch.relu),
    (functools.partial(torch.sin), functools.partial(torch.cos)),
    (slice(1), slice(2)),
    ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION]),  # no `Enum`
    (Scaled(1.0), Scaled(2.0)),
    (UserDict(scale=1), UserDict(scale=2)),
    (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    ({(1, 2)}, {(1, 3)}),
    (Kind.ONE, OtherKind.ONE),
    (Slotted(1), Slotted(2)),
    (re.compile("a"), re.compile("b")),
    (Path("a"), Path("b")),
    (numpy.zeros(2), numpy.ones(2)),
    (numpy.float64(1), numpy.float64(2)),
    ([nn.Parameter(torch.zeros(2))], [nn.Parameter(torch.ones(2))]),
    ([nn.Dropout(0.1)], [nn.Dropout(0.2)]),
    (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor),
    (F.mse_loss, F.l1_loss),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x, k=1: x + k, lambda x, k=2: x + k),
    (contextlib.contextmanager(scaled(1.0)), contextlib.contextmanager(scaled(2.0))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_other_attributes_have_another_digest(pair: tuple[Any, Any]) -> None:
    seen = []
    for value in pair:
        model = Model()
        model.extra = value
        seen.append(digest(model))
        assert digest(model) == seen[-1]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("value", [iter([1]), memoryview(b"a"), torch.Generator(), {object()}], ids=type)
def test_an_object_that_cannot_be_compared_is_refused(value: Any) -> None:
    model = Model()
    model.extra = value
    with pytest.raises(UnreadableError):
        digest(model)


def asks_for_the_rank(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean() * (torch.distributed.get_rank() + 1)


def test_code_that_asks_for_the_process_is_named() -> None:
    assert ModelDigest(Model(), scaled(1.0)).per_process is None
    assert ModelDigest(Model(), asks_for_the_rank).per_process == f"{__name__}.asks_for_the_rank"


def test_the_settings_of_torch_count() -> None:
    before = digest(Model())
    torch.set_default_dtype(torch.float64)
    try:
        assert ModelDigest(Model().float(), None).digest != before
    finally:
        torch.set_default_dtype(torch.float32)


class Listed(nn.Linear):
    """Applies operators in the order of a dict."""

    def forward(self, x: Tensor) -> Tensor:
        for name in self.ops:
            x = getattr(torch, name)(x)
        return super().forward(x)


def test_the_order_of_a_dict_counts_for_saved_graphs_alone() -> None:
    one, other = Listed(2, 2), Listed(2, 2)
    one.ops, other.ops = {"relu": 1, "tanh": 1}, {"tanh": 1, "relu": 1}
    first, second = ModelDigest(one, None), ModelDigest(other, None)
    assert first.digest == second.digest and first.in_order != second.in_order
