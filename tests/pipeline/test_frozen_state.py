"""Frozen parameters that a forward updates in place, such as an EMA teacher's, are state like buffers."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import BatchError, CaptureError
from tests.distributed import run_ranks

WIDTH = 4


class Teacher(nn.Module):
    """A student of two layers, and a frozen teacher that follows it; the forward returns the difference of their outputs."""

    def __init__(self, update: str = "before") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.update = update
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.teacher = deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.update == "data":
                own.data.mul_(0.75).add_(other.data, alpha=0.25)
            else:
                own.mul_(0.75).add_(other, alpha=0.25)

    def forward(self, x: Tensor) -> Tensor:
        if self.update != "after":
            self.follow()
        y = self.student(x)
        aim = self.teacher(x + 1)
        if self.update == "after":
            self.follow()
        return y - aim


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def trained(rank: int, update: str, split: list[str] | None, schedule: str) -> list[Any]:
    """Losses and gradients of three steps of SGD, and the parameters after them, of this rank; `split=None`: plain eager."""
    model, losses, grads = Teacher(update), [], []
    pipe = None if split is None else graphpp.compile(model, F.mse_loss, split=split, schedule=schedule, microbatches=2)
    optimizer = None
    for seed in range(3):
        x, target = batch(seed)
        if optimizer:
            optimizer.zero_grad()
        if pipe:
            losses.append(pipe.step(x, target=target).losses)
        else:
            parts = [F.mse_loss(model(a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
            for part in parts:
                (part / 2).backward()
            losses.append(torch.stack(parts).detach())
        mine = dict(pipe.named_parameters() if pipe else model.named_parameters())
        optimizer = optimizer or torch.optim.SGD([p for p in mine.values() if p.requires_grad], lr=0.1)
        grads.append({fqn: None if p.grad is None else p.grad.clone() for fqn, p in mine.items() if p.requires_grad})
        optimizer.step()
    return [losses, grads, mine]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("update", "split", "schedule", "ranks"),
    [
        ("before", ["student.2"], "1F1B", 2),
        ("data", ["teacher.0"], "GPipe", 1),
        ("after", ["teacher.0"], "ZBVZeroBubble", 1),
        ("before", ["student.2"], "1F1B", 1),
        ("after", ["teacher.0"], "1F1B", 1),
        ("after", ["student.2"], "GPipe", 2),
    ],
)
def test_a_teacher_follows_the_student(update: str, split: list[str], schedule: str, ranks: int) -> None:
    losses, grads, parameters = trained(0, update, None, schedule)
    found = run_ranks(trained, ranks, update, split, schedule) if ranks > 1 else [trained(0, update, split, schedule)]
    assert set().union(*(each[2] for each in found)) == set(parameters)
    for each in found:
        assert all(map(torch.equal, each[0], losses))
        for mine, theirs in zip(each[1], grads, strict=True):
            assert all(torch.equal(grad, theirs[fqn]) for fqn, grad in mine.items())
        assert [fqn for fqn, value in each[2].items() if not torch.equal(value, parameters[fqn])] == []


def test_state_dict_and_verification_have_the_teacher() -> None:
    model, (x, target) = Teacher(), batch(0)
    before = deepcopy(model.state_dict())
    pipe = graphpp.compile(model, F.mse_loss, split=["student.2"], microbatches=2)
    report = graphpp.verify(model, F.mse_loss, graphpp.Microbatch((x,), target=target), split=["student.2"], microbatches=2)
    assert "4 buffers" in str(report)
    assert str(report).count("equal, every bit") == 2
    pipe.profile(x, target=target, repeat=1)
    assert all(torch.equal(value, before[fqn]) for fqn, value in model.state_dict().items())
    pipe.step(x, target=target)
    assert pipe.state_dict().keys() == before.keys()
    other = graphpp.compile(Teacher(), F.mse_loss, split=["student.2"], microbatches=2)
    other.step(x, target=target)
    other.load_state_dict(pipe.state_dict())
    assert torch.equal(other.step(x, target=target).losses, pipe.step(x, target=target).losses)


def trainable(model: nn.Module) -> None:
    model.teacher.requires_grad_(True)


def cut_apart(model: nn.Module) -> None:
    model.update = "after"


@pytest.mark.filterwarnings("ignore:.*requires gradient")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (trainable, r"in place into teacher\.0\.weight, which is neither a buffer nor a frozen parameter"),
        (cut_apart, r"frozen parameter teacher\.0\.weight is written in stage .* move the cut"),
    ],
)
def test_state_that_cannot_be_right_is_refused(change: Callable[[nn.Module], None], words: str) -> None:
    model, (x, target) = Teacher(), batch(0)
    change(model)
    with pytest.raises(CaptureError, match=words):
        graphpp.compile(model, F.mse_loss, split=["student.2", "teacher.2"], microbatches=2).step(x, target=target)


def test_an_evaluation_without_an_update_reads_the_teacher_of_the_last_step() -> None:
    model, (x, target) = Teacher(), batch(0)
    forward = model.follow
    model.follow = lambda: forward() if model.training else None
    pipe = graphpp.compile(model, F.mse_loss, split=["student.2"], microbatches=2)
    pipe.step(x, target=target)
    with torch.no_grad():
        expected = model.eval()(x)
    model.train()
    assert torch.allclose(pipe.eval(x).output, expected, rtol=0, atol=1e-6)


class Behind(Teacher):
    """Sends the student's output through the teacher, which is updated for microbatches of two rows only."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            self.follow()
        return self.teacher(self.student(x))


def test_a_microbatch_that_reads_the_teacher_too_late_is_refused() -> None:
    """The backward of three rows reads the teacher, after or before the forward of two rows has updated the teacher."""
    (x, target), model = batch(0), Behind()
    parts = [graphpp.Microbatch((x[:rows],), {}, target[:rows]) for rows in (3, 2)]
    with pytest.raises(BatchError, match=r"microbatch 1 .* other new values of buffers"):
        graphpp.compile(model, F.mse_loss, split=["student.2"], schedule="GPipe").step_microbatches(parts)
