"""Under `torch.autograd.detect_anomaly` a step raises where autograd raises, and names the operator of the backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further

WIDTH = 4
pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def good(x: Tensor) -> Tensor:
    return x.tanh()


def bad(x: Tensor) -> Tensor:
    return (0.0 * x).sqrt() * x  # its backward is 0 / 0


def masked(x: Tensor) -> Tensor:
    """NaN in the forward alone."""
    return torch.where(x > 0, x.log().relu(), x)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.line(x))


def model(at: int, function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(function if each == at else good) for each in range(4)))


def raised(rank: int, at: int, function: Callable[[Tensor], Tensor], nan: bool, options: dict[str, Any]) -> str:
    """The error of a step of two microbatches; "" for none."""
    torch.set_num_threads(1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.nan if nan else x[0, 0]
    pipe = graphpp.compile(model(at, function), F.mse_loss, split=["2"], microbatches=2, **options)
    try:
        with torch.autograd.detect_anomaly():
            pipe.step(x, target=torch.ones(4, WIDTH))
    except graphpp.GraphPPError as error:
        return str(error)
    return ""


def in_eager(at: int, function: Callable[[Tensor], Tensor], nan: bool) -> bool:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.nan if nan else x[0, 0]
    try:
        with torch.autograd.detect_anomaly():
            F.mse_loss(model(at, function)(x), torch.ones(4, WIDTH)).backward()
    except RuntimeError as error:
        return "returned nan" in str(error)
    return False


@pytest.mark.parametrize(
    ("at", "function", "nan", "options"),
    [
        (1, bad, False, {}),
        (1, good, True, {"memory": "full"}),
        (1, masked, False, {"memory": "full"}),
        *further(
            (3, bad, False, {"memory": 0.5}),
            (0, bad, False, {"gradients": graphpp.Gradients(fused=True)}),
            (0, bad, False, {"schedule": graphpp.Schedule.of(["0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"])}),
            (1, good, False, {}),
        ),
    ],
)
def test_a_step_raises_where_autograd_does(at: int, function: Any, nan: bool, options: dict[str, Any]) -> None:
    found = raised(0, at, function, nan, options)
    assert bool(found) == in_eager(at, function, nan) == (nan or function is bad), found
    if function is bad:
        assert "gives NaN, f32[2, 4] in " in found and f"in {at} ({__file__}:" in found, found


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return bad(x * self.scale)


@pytest.mark.parametrize("microbatches", further(1, 2))
def test_gradients_of_compiled_regions_are_named_by_parameter(microbatches: int) -> None:
    """No operator of the region is seen."""
    x = torch.randn(4, WIDTH)
    pipe = graphpp.compile(
        nn.Sequential(Scale(), Scale()), F.mse_loss, split=["1"], microbatches=microbatches, backend="inductor"
    )
    with torch.autograd.detect_anomaly(), pytest.raises(graphpp.GraphPPError, match=r"gradient of 1.scale has NaN|gives NaN"):
        pipe.step(x, target=x)


def test_all_ranks_raise() -> None:
    first, second = run_ranks(raised, 2, 0, bad, False, {"schedule": "1F1B", "parallel": graphpp.Parallel(timeout=20)})
    assert "gives NaN" in first and second, (first, second)


def test_without_checks_for_nan_a_step_goes_on() -> None:
    x, own = torch.randn(4, WIDTH), model(0, bad)
    pipe = graphpp.compile(own, F.mse_loss, split=["2"], microbatches=2)
    with torch.autograd.detect_anomaly(check_nan=False):
        pipe.step(x, target=x)
    assert own[0].line.weight.grad.isnan().any()
