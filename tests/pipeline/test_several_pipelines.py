"""Several pipelines over one model: parameters on the same ranks train as one model; stale copies are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def compiled(model: nn.Module, split: list[str], loss: Any = F.mse_loss, *, release: bool = False) -> graphpp.Pipeline:
    example, memory = graphpp.Microbatch((X[:4],), target=X[:4]), graphpp.Memory(release=release)
    return graphpp.compile(model, loss, split=split, schedule="GPipe", microbatches=2, example=example, memory=memory)


def trained(pipe: graphpp.Pipeline) -> float:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = float(pipe.step(X, target=X).loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def outcome(call: Any) -> str:
    try:
        return str(call())
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"


def other_cuts(rank: int, evaluate: bool) -> list[str]:
    torch.set_num_threads(1)
    model = layers()
    first, second = compiled(model, ["1"]), compiled(model, ["3"])
    trained(first)
    call = (lambda: second.eval(X, target=X)) if evaluate else (lambda: second.step(X, target=X))
    return [outcome(call), outcome(lambda: trained(first))]


@pytest.mark.parametrize("evaluate", [False, True], ids=["step", "eval"])
def test_copies_that_another_pipeline_has_left_behind_are_refused_on_all_ranks(evaluate: bool) -> None:
    found = run_ranks(other_cuts, 2, evaluate)
    assert "rank 1 of another pipeline of this process has trained the parameter 1.weight" in found[0][0]
    assert "Error" in found[1][0] and "1.weight" in found[1][0]
    assert found[0][1] == found[1][1] and float(found[0][1]) > 0  # the first pipeline goes on


def a_new_cut(rank: int, load: bool, drop: bool) -> str:
    torch.set_num_threads(1)
    model = layers()
    pipe = compiled(model, ["1"])
    for _ in range(2):
        trained(pipe)
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, pipe.state_dict())
    if drop:
        del pipe
    if load:
        model.load_state_dict({**states[0], **states[1]})
    return outcome(lambda: float(compiled(model, ["3"]).step(X, target=X).loss))


def thawed(rank: int, replace: bool) -> str:
    """A second cut, after a step that trained a layer that was frozen, or replaced, after the first step."""
    torch.set_num_threads(1)
    model = layers()
    model[1].requires_grad_(replace)
    pipe = compiled(model, ["1"])
    trained(pipe)
    if replace:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    model[1].requires_grad_(True)
    trained(pipe)
    return outcome(lambda: float(compiled(model, ["3"]).step(X, target=X).loss))


@pytest.mark.parametrize("replace", [False, True], ids=["thawed", "replaced"])
def test_parameters_that_train_later_leave_copies_too(replace: bool) -> None:
    assert all("1.weight" in each for each in run_ranks(thawed, 2, replace))


def loss_after(steps: int) -> float:
    model = layers()
    pipe = compiled(model, ["1"])
    for _ in range(steps):
        trained(pipe)
    return float(pipe.step(X, target=X).loss)


@pytest.mark.parametrize("drop", [False, *further(True)])
def test_a_new_cut_needs_the_trained_values(drop: bool) -> None:
    assert run_ranks(a_new_cut, 2, True, drop) == [str(loss_after(2))] * 2
    assert all("1.weight" in each for each in run_ranks(a_new_cut, 2, False, drop))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = layers(2), layers(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.discriminator(self.generator(x).tanh())


def sum_of(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() / 8


def gan(rank: int, split: list[list[str]]) -> list[str]:
    """Generator and discriminator in turn, with a pipeline each; both hold the discriminator."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Both()
    whole = compiled(model, split[0], sum_of, release=True)
    alone = compiled(model.discriminator, split[1], release=True)
    of_generator = [p for fqn, p in whole.named_parameters() if fqn.startswith("generator")]
    generator = torch.optim.SGD(of_generator or [torch.zeros(1)], lr=0.1)
    discriminator = torch.optim.SGD(list(alone.parameters()) or [torch.zeros(1)], lr=0.1)

    def rounds() -> list[float]:
        losses = []
        for _ in range(3):
            for pipe, optimizer in ((whole, generator), (alone, discriminator)):
                losses.append(float(pipe.step(X, target=X).loss))
                optimizer.step()
                for parameter in model.parameters():
                    parameter.grad = None
        return losses

    return [outcome(rounds)]


def test_a_generator_and_its_discriminator() -> None:
    right = [["discriminator.1"], ["1"]]
    expected = gan(0, right)
    assert run_ranks(gan, 2, right) == [expected, expected]
    refused = run_ranks(gan, 2, [["discriminator.0"], ["1"]])
    words = "a pipeline of this process that holds them on other ranks has given their memory back"
    assert all("Error" in each[0] and words in each[0] for each in refused), refused


def clips_on_one_rank(rank: int, norm: float) -> list[str]:
    torch.set_num_threads(1)
    pipe = compiled(layers(), ["2"])
    pipe.step(X, target=X)
    other = (lambda: pipe.clip_grad_norm_(norm)) if norm else (lambda: pipe.step(X, target=X).loss)
    call = (lambda: pipe.clip_grad_norm_(1.0)) if rank == 0 else other
    return [outcome(call), outcome(lambda: pipe.clip_grad_norm_(2.0))]


@pytest.mark.parametrize(("norm", "says"), [(0.0, "clip_grad_norm_"), (3.0, "max_norm")])
def test_ranks_that_make_other_calls_than_clipping_raise(norm: float, says: str) -> None:
    found = run_ranks(clips_on_one_rank, 2, norm)
    assert all("MismatchError" in each[0] and says in each[0] for each in found), found
    assert found[0][1] == found[1][1] and float(found[0][1].removeprefix("tensor(").removesuffix(")")) > 0
