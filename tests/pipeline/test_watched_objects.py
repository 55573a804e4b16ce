"""State outside of tensors that changes between steps: each step has eager's numbers for the state of its time."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import logging
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 8)
SCALE = 1.0
IN_CONTEXT = contextvars.ContextVar("scale", default=1.0)
TABLE: dict[str, Any] = {"inner": {"scale": 1.0}}


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    unused: int = 0
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Mapped:
    """Answers for names that are not there, as configurations of transformers do."""

    def __init__(self) -> None:
        self.n_scale = 1.0

    def __getattr__(self, name: str) -> Any:
        if name == "scale":
            return self.n_scale
        raise AttributeError(name)


class Computing:
    def __init__(self) -> None:
        self._half = 0.5

    @property
    def scale(self) -> float:
        return 2 * self._half


class Options:
    scale = 1.0


def closed_over() -> Any:
    numbers = [1.0]
    return lambda: numbers[0], numbers


IN_HOOK = [1.0]


def scaling(numbers: list[float]) -> Any:
    return lambda module, args, output: output * numbers[0]


class Inner:
    def __init__(self) -> None:
        self.computing = Computing()

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.computing.scale


class Mode(enum.Enum):
    ONE, THREE = 1, 3


class Level(enum.IntEnum):
    ONE, THREE = 1, 3


def as_global(m: Any) -> float:
    return SCALE


class Plain:
    scale = 1.0


class Holding(nn.Module):
    """Scales its output by a number that `number` finds in what the module holds."""

    power = 1.0
    table: ClassVar[dict[str, float]] = {"scale": 1.0}
    from_closure, numbers = closed_over()

    def __init__(self, number: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.config, self.space, self.slotted = Config(inner=Config()), types.SimpleNamespace(scale=1.0), Slotted()
        self.mapped, self.computing = Mapped(), Computing()
        self.called, self.mode, self.level, self.number_of_numpy = Inner(), Mode.ONE, Level.ONE, np.float64(1.0)
        self.queue: collections.deque[float] = collections.deque([1.0], maxlen=1)
        self.nested: dict[str, Any] = {"a": {"b": 1.0}}
        self.deep = [1.0, (2.0, [3.0])]
        self.scale, self.flag, self.mask, self.masks = 1.0, False, torch.ones(2), [torch.ones(2)]
        self.array, self.chosen = np.ones(2), {"scale"}
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.options, self.hidden, self.mapping = Options(), [nn.Dropout(0.25)], collections.UserDict(scale=1.0)
        self.last.register_forward_hook(scaling(IN_HOOK))
        self.number, self.plain, self.derived = number, Plain(), type("Derived", (Plain,), {})()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.inner(x))) * self.number(self)


def set_global(m: Any) -> None:
    globals()["SCALE"] = 3.0


def exchange_forward(m: Any) -> None:
    m.forward = types.MethodType(lambda self, x: self.last(self.inner(x)) * 3.0, m)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda m: m.scale, lambda m: setattr(m, "scale", 3.0)),
    "flag": (lambda m: 3.0 if m.flag else 1.0, lambda m: setattr(m, "flag", True)),
    "tensor": (lambda m: m.mask.mean(), lambda m: setattr(m, "mask", torch.full((2,), 3.0))),
    "tensor in a list": (lambda m: m.masks[0].mean(), lambda m: m.masks.__setitem__(0, torch.full((2,), 3.0))),
    "dataclass": (lambda m: m.config.scale, lambda m: setattr(m.config, "scale", 3.0)),
    "namespace": (lambda m: m.space.scale, lambda m: setattr(m.space, "scale", 3.0)),
    "object in an object": (lambda m: m.config.inner.scale, lambda m: setattr(m.config.inner, "scale", 3.0)),
    "exchanged object": (lambda m: m.config.scale, lambda m: setattr(m, "config", Config(3.0))),
    "slots": (lambda m: m.slotted.scale, lambda m: setattr(m.slotted, "scale", 3.0)),
    "number of a class, hidden": (lambda m: m.plain.scale, lambda m: setattr(m.plain, "scale", 3.0)),
    "number of a base, hidden": (lambda m: m.derived.scale, lambda m: setattr(type(m.derived), "scale", 3.0)),
    "another name": (lambda m: m.mapped.scale, lambda m: setattr(m.mapped, "n_scale", 3.0)),
    "property of an object": (lambda m: m.computing.scale, lambda m: setattr(m.computing, "_half", 1.5)),
    "getattr": (lambda m: getattr(m.config, "new", 1.0), lambda m: setattr(m.config, "new", 3.0)),
    "dict in a dict": (lambda m: m.nested["a"]["b"], lambda m: m.nested["a"].update(b=3.0)),
    "list in a tuple in a list": (lambda m: m.deep[1][1][0], lambda m: m.deep[1][1].__setitem__(0, 5.0)),
    "array": (lambda m: float(m.array.sum()), lambda m: m.array.__setitem__(0, 5.0)),
    "set": (lambda m: 1.0 if "scale" in m.chosen else 3.0, lambda m: m.chosen.clear()),
    "number of the class": (lambda m: m.power, lambda m: setattr(type(m), "power", type(m).power + 1)),
    "dict of the class": (lambda m: m.table["scale"], lambda m: m.table.update(scale=3.0)),
    "number of an object's class": (lambda m: m.options.scale, lambda m: setattr(Options, "scale", 3.0)),
    "closure of a method": (lambda m: type(m).from_closure(), lambda m: m.numbers.__setitem__(0, 3.0)),
    "closure of a hook": (lambda m: 1.0, lambda m: IN_HOOK.__setitem__(0, 3.0)),
    "module in a list": (lambda m: m.hidden[0].p, lambda m: setattr(m.hidden[0], "p", 0.5)),
    "dict of a user": (lambda m: m.mapping["scale"], lambda m: m.mapping.update(scale=3.0)),
    "context variable": (lambda m: IN_CONTEXT.get(), lambda m: IN_CONTEXT.set(3.0)),
    "function": (lambda m: 1.0, lambda m: setattr(m, "act", torch.relu)),
    "forward": (lambda m: 1.0, exchange_forward),
    "callable object": (lambda m: m.called(1.0), lambda m: setattr(m.called.computing, "_half", 1.5)),
    "member of an enumeration": (lambda m: m.mode.value, lambda m: setattr(m, "mode", Mode.THREE)),
    "integer of an enumeration": (lambda m: int(m.level), lambda m: setattr(m, "level", Level.THREE)),
    "number of NumPy": (lambda m: float(m.number_of_numpy), lambda m: setattr(m, "number_of_numpy", np.float64(3.0))),
    "queue": (lambda m: m.queue[0], lambda m: m.queue.append(3.0)),
    "global": (as_global, set_global),
    "dict in a global": (lambda m: TABLE["inner"]["scale"], lambda m: TABLE["inner"].update(scale=3.0)),
}


def eager(model: nn.Module, loss: Any = F.mse_loss) -> Tensor:
    losses = [loss(model(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
    return torch.stack([each.detach() for each in losses])


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    globals()["SCALE"] = 1.0
    TABLE["inner"]["scale"] = Holding.power = Holding.table["scale"] = Options.scale = 1.0
    Holding.numbers[0] = IN_HOOK[0] = 1.0
    IN_CONTEXT.set(1.0)


LEADING = (
    *("number", "tensor in a list", "object in an object", "slots", "another name", "property of an object", "array", "set"),
    *("number of the class", "closure of a hook", "context variable", "forward", "queue", "dict in a global"),
    *("number of a class, hidden", "number of a base, hidden"),
)


@pytest.mark.first_cases(8)
@pytest.mark.parametrize("name", [*LEADING, *further(*(name for name in CHANGES if name not in LEADING))])
def test_a_change_is_followed(name: str) -> None:
    number, change = CHANGES[name]
    model = Holding(number)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=2)
    before = pipe.step(X, target=Y).losses
    assert torch.equal(before, eager(model))
    change(model)
    after = pipe.step(X, target=Y).losses
    assert torch.equal(after, eager(model))
    assert not torch.equal(before, after)


def counted(pipe_of: Callable[[], Any], steps: int, between: Callable[[int], Any]) -> int:
    with internals.captures() as made:
        pipe = pipe_of()
        for at in range(steps):
            pipe.step(X, target=Y)
            between(at)
    return len(made)


def test_hooks_that_only_look_on_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))  # torch's own hooks are not told
    with caplog.at_level(logging.WARNING, logger="graphpp"):
        graphpp.compile(model, F.mse_loss, microbatches=2)
        assert not caplog.records
        model.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        pipe = graphpp.compile(model, F.mse_loss, microbatches=2)
        x = torch.ones(4, 8)
        for _ in range(2):
            pipe.step(x, target=x)
    assert [record.getMessage().startswith("1 forward hooks are traced") for record in caplog.records] == [True]


class Trainer:
    """A trainer whose method is the loss, with a number that the loss reads and a counter that it does not read."""

    def __init__(self) -> None:
        self.alpha, self.steps, self.history = 1.0, 0, list[float]()
        self.model = nn.Linear(2, 2)

    def weight(self) -> float:
        return self.alpha

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.weight()


def test_the_object_of_a_bound_loss_is_watched_where_the_loss_reads_it() -> None:
    trainer, model = Trainer(), Holding(lambda m: 1.0)
    pipe = graphpp.compile(model, trainer.loss, microbatches=2)
    for alpha in (1.0, 2.0, 1.0):
        trainer.alpha = alpha
        assert torch.equal(pipe.step(X, target=Y).losses, eager(model, trainer.loss))

    def count(at: int) -> None:
        trainer.steps += 1
        trainer.history.append(0.5)

    assert counted(lambda: graphpp.compile(model, trainer.loss, microbatches=2), 4, count) == 1


def test_what_the_code_does_not_read_causes_no_capture() -> None:
    model = Holding(lambda m: m.config.scale)

    def change(at: int) -> None:
        model.config.unused += 1
        model.config.scale = float("1.0")  # another object of the same value
        model.nested, model.mapped = copy.deepcopy(model.nested), Mapped()

    assert counted(lambda: graphpp.compile(model, F.mse_loss, microbatches=2), 4, change) == 1


CALLS = {"n": 0}
COUNT = 0


def counting(m: Any) -> float:
    globals()["COUNT"] = COUNT + 1
    CALLS["n"] += 1
    return 1.0


def test_a_forward_that_counts_in_a_global_variable_is_captured_once() -> None:
    model = Holding(counting)
    assert counted(lambda: graphpp.compile(model, F.mse_loss, microbatches=2), 4, lambda at: None) == 1


def test_hooks_that_follow_each_other_are_told_apart() -> None:
    model = Holding(lambda m: 1.0)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=2)
    for factor in (1.0, 2.0, 3.0, 4.0):
        handle = model.inner.register_forward_hook(lambda module, args, output, factor=factor: output * factor)
        assert torch.equal(pipe.step(X, target=Y).losses, eager(model)), factor
        handle.remove()
        del handle


def test_recapture(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    model = Holding(lambda m: float(os.environ.get("GRAPHPP_TEST_SCALE", "1")))
    pipe = graphpp.compile(model, F.mse_loss, microbatches=2)
    pipe.step(X, target=Y)
    monkeypatch.setenv("GRAPHPP_TEST_SCALE", "3")
    pipe.recapture()
    assert torch.equal(pipe.step(X, target=Y).losses, eager(model))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def optimizer_in_backward(parameters: Any) -> None:
    """An optimizer per parameter that steps as soon as the gradient is complete."""
    optimizers = {each: torch.optim.Adam([each], lr=0.1) for each in parameters}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in optimizers:
        each.register_post_accumulate_grad_hook(step)


def trained(rank: int, before: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = two_layers()
    if before:
        optimizer_in_backward(model.parameters())
    pipe = graphpp.compile(model, F.mse_loss, split=["2"], microbatches=2, example=graphpp.Microbatch((X[:4],), target=Y[:4]))
    if not before:
        optimizer_in_backward(pipe.parameters())
    for _ in range(3):
        pipe.step(X, target=Y)
    return {fqn: each.detach() for fqn, each in pipe.named_parameters()}


def by_hand() -> dict[str, Tensor]:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: each.detach() for fqn, each in model.named_parameters()}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("ranks", "before"), [(1, True), (2, False), (1, False), (2, True)])
def test_an_optimizer_in_the_backward_trains(ranks: int, before: bool) -> None:
    """`before`: whether the optimizers are hooked in before `compile`."""
    found: dict[str, Tensor] = {}
    for each in [trained(0, before)] if ranks == 1 else run_ranks(trained, ranks, before):
        found |= each
    expected = by_hand()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())
