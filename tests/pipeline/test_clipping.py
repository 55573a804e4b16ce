"""`clip_grad_norm_` takes torch's arguments, gives torch's bits, and follows gradients that come and go on some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.parallel.rank_place import RankPlace
from graphpp.pipeline.grad_norm import RankGradients
from tests.distributed import run_ranks

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def trained(**options: Any) -> tuple[nn.Module, graphpp.Pipeline]:
    torch.set_num_threads(1)
    model = layers()
    pipe = graphpp.compile(model, F.mse_loss, schedule="GPipe", microbatches=2, **options)
    pipe.step(X, target=X)
    return model, pipe


def gradients_come_and_go(rank: int) -> list[float]:
    """The norms with all gradients, without one of rank 1, and with all of them again in another dtype on rank 0."""
    model, pipe = trained(split=["2"])
    found = [pipe.clip_grad_norm_(1e9)]
    for change in ("without", "back"):
        pipe.step(X, target=X)
        if change == "without" and rank == 1:
            model[3].bias.grad = None
        found.append(pipe.clip_grad_norm_(1e9))
    return [float(norm) for norm in found]


def test_gradients_that_come_and_go_on_one_rank() -> None:
    model = layers()
    expected = []
    for change in ("first", "without", "back"):
        for part in X.split(4):
            (F.mse_loss(model(part), part) / 2).backward()
        if change == "without":
            model[3].bias.grad = None
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    assert run_ranks(gradients_come_and_go, 2) == [expected] * 2


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_s_arguments(foreach: bool | None) -> None:
    model, pipe = trained()
    twin = layers()
    for part in X.split(4):
        (F.mse_loss(twin(part), part) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type=1, error_if_nonfinite=True, foreach=foreach)
    assert torch.equal(pipe.clip_grad_norm_(0.1, norm_type=1, error_if_nonfinite=True, foreach=foreach), wanted)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))


def overflows(rank: int) -> tuple[str, bool]:
    model, pipe = trained(split=["2"])
    if rank == 1:
        model[3].bias.grad[0] = float("inf")
    before = {fqn: parameter.grad.clone() for fqn, parameter in pipe.named_parameters()}
    try:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error), all(torch.equal(parameter.grad, before[fqn]) for fqn, parameter in pipe.named_parameters())
    return "no error", False


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks_if_asked() -> None:
    for text, unchanged in run_ranks(overflows, 2):
        assert "of the gradients of all ranks is inf, so nothing was clipped" in text and unchanged


class Complex(nn.Module):
    """A model with complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(torch.complex64)).abs()


def test_complex_gradients() -> None:
    model, twin = Complex(), Complex()
    pipe = graphpp.compile(model, F.mse_loss, microbatches=2)
    pipe.step(X, target=X)
    for part in X.split(4):
        (F.mse_loss(twin(part), part) / 2).backward()
    assert torch.equal(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(twin.parameters(), 0.1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(((wrong,), "max_norm: take a number of 0 or more") for wrong in (-1.0, float("nan"), None, "a", True, [1.0])),
        *(((1.0, wrong), "norm_type: take the order") for wrong in (-1, float("nan"), None, "fro", False)),
    ],
)
def test_numbers_that_are_no_norm_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    model, pipe = trained()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(graphpp.GraphPPError, match=says):
        pipe.clip_grad_norm_(*arguments)
    assert all(map(torch.equal, before, (parameter.grad for parameter in model.parameters())))


def refuses_alone(rank: int, wrong: dict[str, Any]) -> tuple[str, float]:
    _, pipe = trained(split=["2"])
    try:
        pipe.clip_grad_norm_(**({"max_norm": 1.0} | (wrong if rank else {})))
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}", float(pipe.clip_grad_norm_(1e9))
    return "no error", 0.0


@pytest.mark.parametrize("wrong", [{"max_norm": -1.0}, {"foreach": 3}])
def test_a_rank_with_a_wrong_argument_tells_the_others(wrong: dict[str, Any]) -> None:
    (good, norm), (bad, other) = run_ranks(refuses_alone, 2, wrong)
    (name,) = wrong
    assert bad.startswith(f"GraphPPError: {name}: ")
    assert good.startswith("MismatchError: ") and f"rank 1: GraphPPError: {name}: " in good
    assert norm == other > 0


def test_a_gradient_without_a_norm_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    weight.grad = torch.zeros_like(weight)
    place = RankPlace(torch.device("cpu"), None, everyone=None)
    with pytest.raises(graphpp.GraphPPError, match=r"layer\.weight: its gradient is torch.float8_e4m3fn, which has no norm"):
        RankGradients.of({"layer.weight": weight}, {"layer.weight": 0}, {"layer.weight": [0]}, place)
