"""Regions beside a kernel that returns other strides than its fake twin promises.

Regions that a backend leaves as they were read and return the strides that the kernels make, so that reductions round as in
the program without regions. Compiled regions get the strides that they were compiled for.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphpp
from tests.backends.test_inductor import strict
from tests.models import Batch
from tests.reference import eager_steps, gradients

MICROBATCHES = 2
COPIES = ("aten.clone", "aten.copy_", "aten.detach", "aten.empty_strided")  # memory of gradients, not arithmetic

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


@torch.library.custom_op("graphpp_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """The same numbers in column-major memory."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


turned.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
turned.register_autograd(lambda ctx, grad: turned(grad))


class Layer(nn.Module):
    """Its gain's gradient is a sum over values that are strided as the input or as the incoming gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain) * x


class Turned(nn.Module):
    """Turns the memory of what passes in either direction."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = turned(x)
        return result


def model() -> nn.Sequential:
    """Equal layers, of which some stand beside the turns and others do not."""
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Turned(), Layer(), Layer(), Layer(), Layer())


def pipeline(net: nn.Module, backend: Any) -> graphpp.Pipeline:
    return graphpp.compile(
        net, nn.functional.mse_loss, split=["3", "4"], microbatches=MICROBATCHES, backend=backend,
        gradients=graphpp.Gradients(fused=False),
    )


class Strides(TorchDispatchMode):
    """Counts the operators called, with the shapes and strides that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[tuple[Any, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not str(func).startswith(COPIES):
            read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            self.seen[str(func), *((tuple(value.shape), value.stride()) for value in read)] += 1
        return func(*args, **kwargs)


def stepped(backend: Any) -> tuple[Counter[tuple[Any, ...]], dict[str, Tensor | None]]:
    """The strides read in a step, and the gradients that it leaves."""
    net, x = model(), torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    pipe = pipeline(net, backend)
    pipe.step(x, target=x)
    net.zero_grad()
    with Strides() as strides:
        pipe.step(x, target=x)
    return strides.seen, gradients(net)


def as_it_is(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    return module


def its_forward(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    return module.forward


def test_the_turned_kernel_breaks_its_promise() -> None:
    """Else the tests below show nothing."""
    seen, _ = stepped("eager")
    assert any(name == "aten.mul.Tensor" and ((4, 6), (1, 4)) in read for name, *read in seen)


@pytest.mark.parametrize("backend", [as_it_is, its_forward])
def test_regions_left_as_they_were_read_the_strides_of_the_program_without_regions(backend: Any) -> None:
    seen, found = stepped(backend)
    expected, wanted = stepped("eager")
    assert seen == expected
    for name, value in wanted.items():
        assert value is not None and torch.equal(found[name], value), name


def changed(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A backend that exchanges the module's code, wants the strides of the examples, and returns the module."""
    module.forward = strict(fx.GraphModule(module, module.graph), examples)
    return module


BACKENDS = [strict, changed, pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_regions_get_the_strides_that_they_were_compiled_for(backend: Any) -> None:
    net, x = model(), torch.randn(8, 6)
    expected = eager_steps(net, nn.functional.mse_loss, [Batch((x,), {}, x)], MICROBATCHES, 1)
    pipeline(net, backend).step(x, target=x)
    for name, value in gradients(net).items():
        assert value is not None and torch.allclose(value, expected.grads[0][name], rtol=1e-5, atol=1e-7), name
