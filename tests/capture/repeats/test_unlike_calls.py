"""Modules that look alike and are not: whatever tells their calls apart, the graph is that of the full trace."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from tests.capture.repeats.same_graph import difference
from tests.exhaustive import further

WIDTH, LAYERS, LATER = 4, 8, 4  # layers from LATER on differ from those before
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A residual layer, scaled by `scale()`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(WIDTH, WIDTH), index

    def scale(self) -> Any:
        return 1.0

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return x + torch.tanh(self.linear(x)) * self.scale()


class Model(nn.Module):
    """Layers between two projections."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer(index) for index in range(layers))

    def before(self, index: int, layer: Any) -> None:
        """Called before each layer."""

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.before(index, layer)
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.end(self.run(self.begin(x)))


def check(model: nn.Module, loss: Any = F.mse_loss, training: bool = True) -> None:
    """The graph equals that of a trace of every module."""
    model.train(training)
    run = partial(capture, model, loss, Microbatch((X,), target=X), torch.device("cpu"), training=training)
    found = run()
    assert difference(found.joint, run(copy_layers=False).joint) is None


# ---------------------------------------------------------------------------------------- state that a layer reads

STATE = SimpleNamespace(calls=0, scale=1.0)
SCALE: ContextVar[float] = ContextVar("scale")


def counts(self: Layer) -> float:
    STATE.calls += 1
    return 2.0 if STATE.calls > LATER else 1.0


def in_slot(self: Any) -> float:
    return float(self.slotted)


class Attributed(dict[str, Any]):
    """A dict with attributes beside its items."""


def with_attributes(index: int) -> Attributed:
    found = Attributed()
    found.scale = 2.0 if index >= LATER else 1.0  # type: ignore[attr-defined]
    return found


READS: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "counter": (counts, lambda index: None),
    "module": (lambda self: STATE.scale, lambda index: None),
    "context variable": (lambda self: SCALE.get(), lambda index: None),
    "type of an integer": (lambda self: 2.0 if isinstance(self.index, int) else 1.0, lambda index: None),
    "integer": (lambda self: 2.0 if self.index >= LATER else 1.0, lambda index: None),
    "text of an integer": (lambda self: float(f"{self.index}.5"), lambda index: None),
    "identity": (lambda self: 2.0 if self.held is STATE.calls else 1.0, lambda index: 1000 + index),
    "dict with attributes": (lambda self: self.held.scale, with_attributes),
    "deque": (lambda self: self.held[0], lambda index: deque([2.0 if index >= LATER else 1.0])),
    "nested": (lambda self: self.held["a"]["b"][0], lambda index: {"a": {"b": [2.0 if index >= LATER else 1.0]}}),
    "negative zero": (lambda self: -1.0 if str(self.held) == "-0.0" else 1.0, lambda index: -0.0 if index >= LATER else 0.0),
    "object": (lambda self: self.held.scale, lambda index: SimpleNamespace(scale=2.0 if index >= LATER else 1.0)),
}


READ_FIRST = ["counter", "identity", "nested"]


@pytest.mark.parametrize("name", [*READ_FIRST, *further(*sorted(set(READS) - set(READ_FIRST)))])
def test_values_that_a_layer_reads(name: str) -> None:
    scale, held = READS[name]

    class Reading(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.held = held(index)

        def scale(self) -> Any:
            return scale(self)

    class Setting(Model):
        def before(self, index: int, layer: Any) -> None:
            STATE.calls = STATE.calls if index else 0
            STATE.scale = 2.0 if index >= LATER else 1.0
            SCALE.set(STATE.scale)

    check(Setting(Reading))


def test_a_layer_that_finds_itself_in_a_table() -> None:
    table: dict[nn.Module, float] = {}

    class Found(Layer):
        def scale(self) -> float:
            return table[self]

    model = Model(Found)
    table.update({layer: 2.0 if index >= LATER else 1.0 for index, layer in enumerate(model.layers)})
    check(model)


def test_an_object_that_the_model_changes() -> None:
    class Configured(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.config = SimpleNamespace(scale=1.0)

        def scale(self) -> float:
            return float(self.config.scale)

    class Changing(Model):
        def before(self, index: int, layer: Any) -> None:
            layer.config.scale = 2.0 if index >= LATER else 1.0

    check(Changing(Configured))


class Scaled(TorchFunctionMode):
    """Multiplies the results of `torch.tanh`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * self.factor if function is torch.tanh else found


def test_modes_with_other_state() -> None:
    class Moded(Model):
        def run(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                with Scaled(2.0 if index >= LATER else 3.0):
                    x = layer(x)
            return x

    check(Moded())


# ------------------------------------------------------------------------------------------------ values that leave

KEPT: list[Any] = []


class Keeping(Layer):
    """A layer that puts a value into a list of the program."""

    def kept(self, x: Tensor, y: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, *rest: Any) -> Any:
        y = super().forward(x)
        KEPT.append(self.kept(x, y))
        return y


class Emptying(Model):
    def forward(self, x: Tensor) -> Any:
        KEPT.clear()
        return super().forward(x)


LEAVING: dict[str, tuple[Any, Any]] = {
    "inputs": (lambda x, y, layer: x, lambda: sum(each.detach().abs().mean() for each in KEPT)),
    "weights": (lambda x, y, layer: layer.linear.weight, lambda: sum(each.detach().abs().mean() for each in KEPT)),
    "results": (lambda x, y, layer: y, lambda: sum(each.abs().mean() for each in KEPT)),
    "the last result": (lambda x, y, layer: y * 2, lambda: KEPT[-1].abs().mean()),
    "a value within": (lambda x, y, layer: torch.tanh(x), lambda: KEPT[3].mean() + KEPT[6].mean()),
    "a number": (lambda x, y, layer: 1.0, lambda: torch.tensor(1.0) * len(KEPT)),
}


@pytest.mark.parametrize("name", ["inputs", "the last result", *further("weights", "results", "a value within", "a number")])
def test_values_that_a_layer_leaves(name: str) -> None:
    kept, read = LEAVING[name]

    class Leaving(Keeping):
        def kept(self, x: Tensor, y: Tensor) -> Any:
            return kept(x, y, self)

    def loss(output: Tensor, target: Tensor) -> Any:
        return F.mse_loss(output, target) * len(KEPT) + read()

    check(Emptying(Leaving), loss)
    check(Emptying(Leaving), lambda output, target: (F.mse_loss(output, target), {"kept": read()}))


# ----------------------------------------------------------------------------------- arguments and results of calls


class TwoInputs(nn.Module):
    """A layer that makes no gradient for its second input."""

    def __init__(self, index: int, read: bool) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + (y.detach() if self.read else 0.0)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_an_input_without_a_gradient(read: bool, training: bool) -> None:
    class Projecting(Model):
        def __init__(self) -> None:
            super().__init__(partial(TwoInputs, read=read))
            self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.layers)

        def run(self, x: Tensor) -> Tensor:
            for layer, projection in zip(self.layers, self.projections, strict=True):
                x = layer(x, torch.tanh(projection(x)))
            return x

    check(Projecting(), training=training)


class TwoResults(Layer):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return super().forward(x), torch.sin(self.linear(x)).mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_result_that_is_not_read(training: bool) -> None:
    class First(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x

    check(First(TwoResults), training=training)


class Transposed(Layer):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return torch.tanh(self.linear(x)).t().contiguous().t()


def test_a_view_that_is_written_after_the_call() -> None:
    class Writing(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x.add_(1.0)
            return x

    check(Writing(Transposed))


class Marked(Layer):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        y = super().forward(x) * getattr(x, "factor", 1.0)
        y.factor = 2.0
        return y


class Conjugating(Layer):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return x + (1.0 if x.is_conj() else 2.0)


def test_properties_of_tensors() -> None:
    class Alternating(Model):
        def run(self, x: Tensor) -> Tensor:
            z = torch.complex(x, x)
            for index, layer in enumerate(self.layers):
                z = layer(z.conj() if index >= LATER else z.clone())
            return z.abs()

    check(Model(Marked))
    check(Alternating(Conjugating))


class Weighted(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x) * (weight if isinstance(weight, nn.Parameter) else 2 * weight)


def test_parameters_as_arguments() -> None:
    class Giving(Model):
        def __init__(self) -> None:
            super().__init__(Weighted)
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.layers)

        def run(self, x: Tensor) -> Tensor:
            for layer, weight in zip(self.layers, self.weights, strict=True):
                x = layer(x, weight)
            return x

    check(Giving())


def test_gradients_that_begin_at_a_layer() -> None:
    class Beginning(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x.detach().requires_grad_())
            return x

    check(Beginning())


def test_calls_within_a_transform() -> None:
    class Mapped(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.func.vmap(layer)(x)
            return x

    check(Mapped(), training=False)


class Flipped(torch.autograd.Function):
    """Multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def test_a_function_with_another_gradient() -> None:
    class Flipping(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(Flipped.apply(x, 2.0 if self.index >= LATER else 1.0))

    check(Model(Flipping))


def test_data_of_a_tensor_is_cut_off() -> None:
    class Cut(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) + self.linear(x.detach() if self.index >= LATER else x)

    class WithData(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x) + self.linear(x.data if self.index >= LATER else x)

    check(Model(Cut))
    check(Model(WithData))


# --------------------------------------------------------------------------- from a second review: state, containers


class Gated(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("gate", torch.ones(WIDTH))

    def scale(self) -> Any:
        return self.gate


def test_a_buffer_that_the_model_assigns() -> None:
    class Assigning(Model):
        def before(self, index: int, layer: Any) -> None:
            if index >= LATER:
                layer.gate = torch.full((WIDTH,), 2.0)

    check(Assigning(Gated))
    check(Assigning(Gated), training=False)


def test_a_call_with_other_weights() -> None:
    class Doubling(Model):
        def run(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                weights = {name: 2 * weight for name, weight in layer.named_parameters()}
                x = torch.func.functional_call(layer, weights, (x,)) if index >= LATER else layer(x)
            return x

    check(Doubling())


class OfModule(torch.autograd.Function):
    """A gradient that depends on a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.index = module.index
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (2.0 if ctx.index >= LATER else 1.0), None


def scaled_function(factor: float) -> Any:
    class OfFactor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * factor

    return OfFactor


def test_functions_that_look_alike() -> None:
    class GivingItself(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(OfModule.apply(x, self))

    class Factory(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.function = scaled_function(2.0 if index >= LATER else 1.0)

        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(self.function.apply(x))

    check(Model(GivingItself))
    check(Model(Factory))


def test_a_list_that_layers_return() -> None:
    log: list[int] = []

    class Logging(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            return super().forward(x), log

    class Counting(Model):
        def run(self, x: Tensor) -> Tensor:
            log.clear()
            for layer in self.layers:
                x, found = layer(x)
                found.append(1)
            return x * len(log)

    check(Counting(Logging))


class Optional(Layer):
    factor = 1.0

    def scale(self) -> Any:
        return self.factor

    def forward(self, x: Tensor, scale: float | None = None) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return y if scale is None else y * scale


def test_code_that_looks_at_the_forward() -> None:
    class Inspecting(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, **({"scale": 3.0} if "scale" in inspect.signature(layer.forward).parameters else {}))
            return x

    class Copying(Model):
        def run(self, x: Tensor) -> Tensor:
            for index, each in enumerate(self.layers):
                layer = copy.copy(each) if index >= LATER else each
                layer.factor = 2.0 if index >= LATER else 1.0
                x = layer(x)
            return x

    check(Inspecting(Optional))
    check(Copying(Optional))


def test_layers_that_are_checkpointed_later() -> None:
    class Checkpointed(Layer):
        def forward(self, x: Tensor, *rest: Any) -> Any:
            run = super().forward
            return checkpoint(run, x, use_reentrant=False) if self.index >= LATER else run(x)

    check(Model(Checkpointed))


class Noisy(Layer):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        return super().forward(x) + torch.rand_like(x) + torch.randn(WIDTH)


def test_random_factories() -> None:
    check(Model(Noisy))


def test_one_line_of_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Indexed(Layer):
        def scale(self) -> float:
            return 2.0 + self.index

    caplog.set_level(logging.INFO, "graphpp")
    check(Model(Indexed))
    lines = [record.getMessage() for record in caplog.records if record.name == "graphpp"]
    assert lines == [
        "layers.0 and 7 modules like it are traced one by one: layers.1 runs other operators than layers.0"
    ]
