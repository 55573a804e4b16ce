"""Higher-order operators of torch (loops, scans, branches) in a model: losses and gradients are eager's, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import graphpp
from graphpp import CaptureError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import Batch, Case
from tests.reference import eager_steps
from tests.training import same

WIDTH = 4
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Model(nn.Module):
    """A function of model and hidden value between two linear layers; the function may use a third layer and a weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.first, self.inner, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(FUNCTIONS[self.name](self, self.first(x)))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def scanned(m: Any, x: Tensor) -> Tensor:
    """A recurrence over the rows, with a parameter of the model, whose last state and outputs are both used."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(state @ m.weight + row)
        return state, state * 2

    last, outputs = scan(step, torch.zeros(WIDTH), x, dim=0)
    return outputs + last


def scanned_with_a_module(m: Any, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(m.inner(state) + row)
        return state, state + 0

    return scan(step, torch.ones(WIDTH), x, dim=0, reverse=True)[1]


def mapped(m: Any, x: Tensor) -> Tensor:
    return map_rows(lambda row: torch.tanh(row @ m.weight), x)


def associative(m: Any, x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b + a, x @ m.weight, dim=0, combine_mode="generic")


def branching(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: torch.tanh(v @ m.weight), m.inner, (x,))


def looping(m: Any, x: Tensor) -> Tensor:
    def body(count: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.tanh(v @ m.weight)

    return while_loop(lambda count, v: count < 3, body, (torch.zeros((), dtype=torch.int64), x))[1]


def looping_without_a_gradient(m: Any, x: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.int64)
    body = lambda count, v: (count + 1, torch.tanh(v * 0.5))  # noqa: E731 - as in looping
    return x + while_loop(lambda count, v: count < 3, body, (count, x.detach()))[1]


def detached(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: x + function(m, x).detach()


def under_no_grad(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = function(m, x)
        return x + found

    return run


def dropping(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, m.dropout, lambda v: v * 2, (x,))


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scan": scanned,
    "scan with a module": scanned_with_a_module,
    "map": mapped,
    "associative_scan": associative,
    "cond": branching,
    "while_loop": looping,
    "while_loop without a gradient": looping_without_a_gradient,
    "dropout in a branch": dropping,
    **{f"{each.__name__} under no_grad": under_no_grad(each) for each in (scanned, mapped, branching, looping)},
    **{f"{each.__name__}, detached": detached(each) for each in (scanned, mapped, associative, branching)},
}


def case(name: str) -> Case:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(6, WIDTH, generator=generator) for _ in range(2))
    return Case(Model(name), square, Batch((x,), {}, target))


def trained(rank: int, name: str, schedule: str = "1F1B", **options: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    made = case(name)
    pipe = graphpp.compile(made.model, made.loss, split=["second"], schedule=schedule, microbatches=2, **options)
    losses = pipe.step(*made.batch.args, target=made.batch.target).losses
    return losses, {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}


def check(name: str, *found: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    """Losses and gradients are bit-equal to eager's; eager has no gradient where a branch was not taken."""
    made = case(name)
    eager = eager_steps(made.model, made.loss, [made.batch], 2, 1, None)
    grads: dict[str, Tensor | None] = {}
    for losses, mine in found:
        assert torch.equal(losses, eager.losses[0])
        grads |= mine
    assert [fqn for fqn, grad in grads.items() if not same(grad, eager.grads[0][fqn])] == []
    assert all(fqn in grads for fqn, grad in eager.grads[0].items() if grad is not None)


SAME = ("scan with a module", "cond", "map", "associative_scan", "while_loop without a gradient", "scan")


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("name", [*SAME, *further(*(name for name in FUNCTIONS if name.endswith("detached")))])
def test_as_in_eager(name: str) -> None:
    check(name, trained(0, name))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["scan with a module", "map"])
def test_on_two_ranks_with_a_split_backward(name: str) -> None:
    check(name, *run_ranks(trained, 2, name, "ZB1P"))


def test_a_loop_that_saves_as_much_as_the_data_decides_is_refused() -> None:
    with pytest.raises(CaptureError, match=rf"while_loop.* at {__file__}:\d+ has a gradient.*torch's scan"):
        trained(0, "while_loop")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.endswith("under no_grad")])
def test_an_operator_whose_no_grad_export_loses_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"runs under torch\.no_grad\(\) at {__file__}:\d+ in .*detach its results"):
        trained(0, name)


def test_random_numbers_in_a_body_are_refused() -> None:
    with pytest.raises(CaptureError, match=rf"cond at {__file__}:\d+ draws random numbers in its body"):
        trained(0, "dropout in a branch")


def differentiating(m: Any, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return scanned(m, x) + torch.autograd.grad(scanned(m, leaf).sum(), leaf)[0]


def test_a_gradient_that_the_model_takes_beside_a_scan_is_refused() -> None:
    FUNCTIONS["a gradient"] = differentiating
    with pytest.raises(CaptureError, match=r"a gradient is taken while the model runs, at .* in differentiating"):
        trained(0, "a gradient")
