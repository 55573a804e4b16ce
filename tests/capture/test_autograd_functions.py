"""Custom `autograd.Function`s keep their own backward: gradients are bit-equal to eager's for every kind of Function.

Each Function's backward is wrong on purpose (doubled, reversed), so that a derivative of its forward is told apart from it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphpp
from graphpp import CaptureError
from tests.distributed import run_ranks
from tests.exhaustive import further

WIDTH = 6


class Reversed(torch.autograd.Function):
    """A view forward, a scaled and reversed gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Affine(torch.autograd.Function):
    """Parameters as arguments, a `setup_context`, and three results: one has no gradient, one is no tensor."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, doubled: bool = True) -> Any:
        return F.linear(x, weight, bias), x > 0, 2 if doubled else 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight if ctx.needs_input_grad[0] else None, 2 * grad.t() @ x, grad.sum(0), None


class InPlace(torch.autograd.Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).sin_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Nested(torch.autograd.Function):
    """Applies another Function, whose backward is then never used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Rounded.apply(x * 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


class Listed(torch.autograd.Function):
    """Takes a list of tensors, which get no gradient, as in eager."""

    @staticmethod
    def forward(ctx: Any, several: list[Tensor], x: Tensor) -> Tensor:
        return torch.stack(several).sum(0) * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def with_no_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        aside = Rounded.apply(layer(x))
    return layer(x) + aside


def with_autocast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Reversed.apply(layer(x), 0.5).float()


def changed(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x).clone()
    InPlace.apply(y)
    return y * x


def affine(layer: nn.Module, x: Tensor) -> Tensor:
    y, positive, factor = Affine.apply(x, layer.weight, layer.bias)
    return y * positive * factor


held = Reversed.apply  # many models hold an `apply` under another name


FORWARDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reversed": lambda layer, x: Reversed.apply(layer(x).tanh(), 0.5),
    "held under a name": lambda layer, x: held(layer(x).tanh(), 0.5),
    "rounded": lambda layer, x: Rounded.apply(layer(x) * 5),
    "affine": affine,
    "in place": lambda layer, x: InPlace.apply(layer(x).clone()),
    "in place, result unused": changed,
    "a list of tensors": lambda layer, x: Listed.apply([x, layer(x)], layer(x)),
    "twice": lambda layer, x: Reversed.apply(Reversed.apply(layer(x), 0.5), 3.0),
    "nested": lambda layer, x: Nested.apply(layer(x)),
    "in no_grad": with_no_grad,
    "in autocast": with_autocast,
}


class Net(nn.Module):
    def __init__(self, forward: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.name = forward

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = FORWARDS[self.name](layer, norm(x))
        return x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return Reversed.apply(F.mse_loss(output, target), 2.0)


def trained(rank: int, names: list[str]) -> list[dict[str, Tensor | None]]:
    """This rank's gradients and buffers after one step of each model."""
    found = []
    for name in names:
        pipe = graphpp.compile(Net(name), loss, split=["norms.2"], schedule="1F1B", microbatches=2)
        pipe.step(batch()[0], target=batch()[1])
        pipe.eval(batch()[0])
        grads = {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}
        found.append({**grads, **dict(pipe.named_buffers())})
    return found


@pytest.mark.parametrize("names", [[*FORWARDS][::2], *further([*FORWARDS][1::2])])
def test_each_keeps_its_own_backward_bit_for_bit(names: list[str]) -> None:
    for name, *parts in zip(names, *run_ranks(trained, 2, names), strict=True):
        model = Net(name)
        plain = deepcopy(model)
        for x, target in zip(*(part.chunk(2) for part in batch()), strict=True):
            (loss(model(x), target) / 2).backward()
            (F.mse_loss(plain(x), target) / 2).backward()
        expected = {fqn: parameter.grad for fqn, parameter in model.named_parameters()} | dict(model.named_buffers())
        merged = {fqn: value for part in parts for fqn, value in part.items()}
        assert merged.keys() == expected.keys()
        assert [fqn for fqn, value in expected.items() if not torch.equal(merged[fqn], value)] == [], name
        grad = merged["layers.3.weight"]
        assert not torch.equal(grad, plain.layers[3].weight.grad), f"{name}: the loss's Function was dropped"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.13 does
def test_a_function_in_a_branch_of_cond_is_refused() -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda y: Rounded.apply(self.layers[0](y)), lambda y: -y, (x,))

    pipe = graphpp.compile(Branching("rounded"), loss)
    with pytest.raises(CaptureError, match=r"custom autograd.Function .*test_autograd_functions.py:\d+ .*inside a region"):
        pipe.step(batch()[0], target=batch()[1])


def test_a_function_that_writes_into_a_buffer_by_itself_is_refused() -> None:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
            module.seen.add_(1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad

    class Counted(Net):
        def __init__(self) -> None:
            super().__init__("rounded")
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return Counting.apply(self, self.layers[0](x))

    model = Counted()
    pipe = graphpp.compile(model, loss)
    with pytest.raises(CaptureError):
        pipe.step(batch()[0], target=batch()[1])
    assert model.seen == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [True, False])
def test_a_reentrant_checkpoint_has_the_gradients_of_eager(first: bool) -> None:
    """As in eager, a reentrant checkpoint without an input that requires grad gives its parameters no gradient."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x if first else self.norms[0](x)
            return self.layers[1](checkpoint(self.layers[0], x, use_reentrant=True))

    model, eager, (x, target) = Checkpointed("rounded"), Checkpointed("rounded"), batch()
    graphpp.compile(model, F.mse_loss, microbatches=1).step(x, target=target)
    F.mse_loss(eager(x), target).backward()
    assert (model.layers[0].weight.grad is None) == first
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is theirs.grad or torch.equal(mine.grad, theirs.grad)
