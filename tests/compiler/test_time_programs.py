"""Layers timed alone: each distinct one once, equal on all ranks, kept in the cache; the estimate where none can be timed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp.compiler import time_programs
from graphpp.compiler.timing import trials
from graphpp.passes.graph.op_costs import OpCosts
from tests.distributed import run_ranks

ASLEEP = 0.02  # seconds


class Clock:
    """A clock that only `rest` moves, but for a microsecond a look: other processes make no layer slower."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "time", CLOCK)


@torch.library.custom_op("timing::rest", mutates_args=())
def rest(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """The values of `x`, after some seconds."""
    CLOCK.now += seconds * CLOCK.slowness
    return x.clone()


@torch.library.custom_op("timing::refuse_zeros", mutates_args=())
def refuse_zeros(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The values of `x`; an index that is 0 everywhere, as made-up ones are, is refused."""
    if not bool(index.any()):
        raise ValueError("an index must have a number other than 0")
    return x.clone()


for operator in (rest, refuse_zeros):
    operator.register_fake(lambda x, *rest: torch.empty_like(x))
    operator.register_autograd(lambda ctx, grad: (grad, None))


class Sleeping(nn.Module):
    """A linear layer beside a rest."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rest(self.linear(x), self.seconds)


def stack(seconds: Sequence[float]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Sleeping(each) for each in seconds))


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


UNEVEN = (ASLEEP, ASLEEP, 2 * ASLEEP, 2 * ASLEEP, 6 * ASLEEP, ASLEEP / 2)


def first_modules(pipe: graphpp.Pipeline) -> list[str]:
    """The first module that each stage calls."""
    return [stage.modules[0].split(" ")[0] for stage in pipe.plan.stages]


def test_a_cut_follows_seconds_that_no_shape_tells() -> None:
    example = graphpp.Microbatch((torch.ones(4, 8),))
    report = graphpp.verify(stack(UNEVEN), mean, example, split="auto", ranks=2, schedule="1F1B")
    assert [stage.modules for stage in report.plan.stages] == [("0 .. 3",), ("4 .. 5",)]


def trained(rank: int) -> list[str]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "time", CLOCK)
        patch.setattr(CLOCK, "slowness", 1 + rank)
        pipe = graphpp.compile(stack(UNEVEN), mean, split="auto", schedule="1F1B", microbatches=2)
        pipe.step(torch.ones(8, 8))
    return first_modules(pipe)


def test_ranks_whose_clocks_differ_cut_alike() -> None:
    first, second = run_ranks(trained, 2)
    assert first == second and first[1].startswith("4")


def test_equal_layers_are_timed_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path))
    made: list[int] = []
    measured = time_programs.Stopwatch._measured

    def counted(self: time_programs.Stopwatch, items: Sequence[Any]) -> list[float]:
        made.append(len(items))
        return measured(self, items)

    monkeypatch.setattr(time_programs.Stopwatch, "_measured", counted)
    for layers in (4, 12, 12):
        pipe = graphpp.compile(stack([0.0] * layers), mean, split="auto", schedule=["0F0 1F0 1B0 0B0"], microbatches=1)
        pipe.step(torch.ones(4, 8))
    assert len(made) == 1 and made[0] > 0, "the programs of 12 layers are those of 4"


def test_programs_that_refuse_made_up_values_are_estimated(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return refuse_zeros(x, index)

    example = graphpp.Microbatch((torch.ones(4, 8), torch.ones(4, dtype=torch.int64)))
    with caplog.at_level(logging.WARNING, "graphpp"):
        found = graphpp.verify(Picky(), mean, example, split="auto", ranks=2, schedule="1F1B")
    found.raise_if_wrong()
    assert "not timed but estimated: made-up values end in ValueError: an index must have" in caplog.text
    estimated = graphpp.verify(
        Picky(), mean, example, split="auto", ranks=2, schedule="1F1B", parallel=graphpp.Parallel(op_costs=OpCosts.of("cpu"))
    )
    assert [each.modules for each in found.plan.stages] == [each.modules for each in estimated.plan.stages]
