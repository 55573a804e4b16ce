"""A step runs a graph's operators below autograd: no Python of an operator's gradient runs around its kernel."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import Tensor, nn

import graphpp

_AUTOGRAD = Path("_library", "autograd.py")  # torch's file with the autograd kernel of a registered operator
_AROUND: list[bool] = []  # for each run of the kernel: whether an autograd kernel called it


def kernel(x: Tensor) -> Tensor:
    _AROUND.append(any(frame.filename.endswith(str(_AUTOGRAD)) for frame in traceback.extract_stack()))
    return x * 3


torch.library.define("graphpp_tests_runner::triple", "(Tensor x) -> Tensor")
torch.library.impl("graphpp_tests_runner::triple", "CPU", kernel)
torch.library.register_fake("graphpp_tests_runner::triple", torch.empty_like)
torch.library.register_autograd("graphpp_tests_runner::triple", lambda ctx, gradient: gradient * 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.graphpp_tests_runner.triple(self.linear(x))
        return result


def test_a_step_calls_no_autograd_kernel() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(4, 4)
    losses = [model(row).square().mean() / 2 for row in x.split(2)]
    eager = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    assert all(_AROUND)
    pipe = graphpp.compile(model, lambda output: output.square().mean(), split=["1"], schedule="ZB1P", microbatches=2)
    pipe.step(x)
    for parameter, *gradients in zip(model.parameters(), *eager, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[0] + gradients[1])
    _AROUND.clear()
    pipe.step(x)
    pipe.eval(x)
    assert len(_AROUND) == 2 * 2 * 2  # layers, microbatches, calls
    assert not any(_AROUND)
