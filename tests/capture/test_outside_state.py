"""State that a trace would freeze is refused with the user's line, or not frozen; checks of values do not stop a capture."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp.errors import CaptureError
from tests.models import Batch, Case
from tests.reference import eager_steps, gradients


class Model(nn.Module):
    """Two linear layers and a function of model and input between them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self, x))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum()


def case(function: Callable[[Any, Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(Model(function), square, Batch((torch.randn(4, 4),), {}, torch.randn(4, 4)))


def run(case: Case) -> Tensor:
    """Run one step in two stages; returns the losses and leaves the gradients in the model."""
    pipe = graphpp.compile(case.model, case.loss, split=["second"], schedule="GPipe", microbatches=2)
    return pipe.step(*case.batch.args, target=case.batch.target).losses


def check(case: Case) -> None:
    """Losses and gradients are eager's."""
    eager = eager_steps(case.model, case.loss, [case.batch], 2, 1, None)
    losses = run(case)
    torch.testing.assert_close(losses, eager.losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(case.model), eager.grads[0], rtol=1e-5, atol=1e-6)


def differentiated(model: Any, x: Tensor) -> Tensor:
    """The derivative of an energy with respect to the input, as in models of forces and scores."""
    x = x.clone().requires_grad_(True)
    energy = model.first(x).tanh().sum()
    return energy + torch.autograd.grad(energy, x, create_graph=True)[0]


OUTSIDE: list[tuple[Callable[[Any, Tensor], Tensor], str]] = [
    (lambda m, x: m.first(x) * random.random(), "draws random numbers from Python's `random`"),
    (lambda m, x: m.first(x) * float(np.random.rand()), "draws random numbers from `numpy.random`"),
    (lambda m, x: m.first(x) * torch.rand(4, generator=torch.Generator().manual_seed(1)), "Generator of its own"),
    (lambda m, x: m.first(x) * torch.empty(4).uniform_(generator=torch.Generator()), "Generator of its own"),
    (differentiated, r"gradient is taken while the model runs, at .*test_outside_state.py.* in differentiated"),
    (lambda m, x: torch.func.grad(lambda v: m.first(v).sum())(x), "gradient is taken while the model runs"),
]


@pytest.mark.parametrize(("function", "said"), OUTSIDE)
def test_what_a_trace_would_freeze_or_lose_is_refused(function: Callable[[Any, Tensor], Tensor], said: str) -> None:
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    with pytest.raises(CaptureError, match=said):
        run(case(function))
    assert random.getstate() == python
    assert str(np.random.get_state(legacy=False)) == str(numpy)


def test_a_check_of_values_is_no_obstacle() -> None:
    """A check of a value, such as Llava's check of the number of image tokens."""

    def checked(m: Any, x: Tensor) -> Tensor:
        large = x[x > 0].numel()
        torch._check(large != 1000)
        torch._assert_async((x < 1000).all())
        return m.first(x)

    check(case(checked))


def test_statistics_are_written_although_nobody_reads_the_normalised_value() -> None:
    def unread(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        m.norm(x)
        return x

    made = case(unread)
    made.model.norm = nn.BatchNorm1d(4)
    eager = eager_steps(made.model, square, [made.batch], 2, 1, None)
    run(made)
    assert torch.equal(made.model.norm.running_mean, eager.buffers["norm.running_mean"])


def test_a_hook_that_the_forward_installs_is_installed_once() -> None:
    """A hook registered in the first call and noted by a flag of the module, as transformers collects hidden states."""

    def collecting(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "seen"):
            m.seen = []
            m.first.register_forward_hook(lambda module, args, output: m.seen.append(output))
        m.seen.clear()
        return m.first(x) * len(m.seen) + m.seen[0]

    made = case(collecting)
    check(made)
    run(made)
    assert not hasattr(made.model, "seen")
    assert not made.model.first._forward_hooks


def test_a_forward_that_raises_leaves_the_model_as_it_was() -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        m.seen = m.first(x)
        raise ValueError("not today")

    made = case(failing)
    with pytest.raises(CaptureError, match="not today"):
        run(made)
    assert not hasattr(made.model, "seen")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused_by_name() -> None:
    made = case(lambda m, x: m.first(x))
    made.model.first = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="the module first is a TorchScript module"):
        run(made)
