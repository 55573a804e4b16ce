"""The straight line of a new call: each table is made once, each kind of program once, and the ranks agree three times."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.facts import Facts
from graphpp.runtime.program import Phase
from graphpp.schedules.generate.names import SCHEDULES
from tests import internals
from tests.distributed import run_ranks

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


@contextmanager
def counting_rounds() -> Iterator[list[Facts]]:
    """Collects the facts of each comparison among ranks."""
    rounds: list[Facts] = []
    compare = Agreement.compare

    def counted(self: Agreement, facts: Facts) -> bool:
        if self.several:
            rounds.append(facts)
        return compare(self, facts)

    with patch.object(Agreement, "compare", counted):
        yield rounds


def rounds_of_calls(rank: int) -> list[int]:
    """The comparisons of three steps and an evaluation."""
    torch.set_num_threads(1)
    pipe = graphpp.compile(model(), F.mse_loss, split=2, schedule="1F1B", microbatches=3)
    calls = [lambda: pipe.step(X, target=X)] * 3 + [lambda: pipe.eval(X)]
    found = []
    for call in calls:
        with counting_rounds() as rounds:
            call()
        found.append(len(rounds))
    return found


def test_a_new_call_takes_three_rounds_and_a_known_one_takes_one() -> None:
    """One more round in all is among the replicas; here there are none."""
    assert run_ranks(rounds_of_calls, 2) == [[3, 1, 1, 3]] * 2


def test_a_table_is_made_once_for_its_counts() -> None:
    made: list[tuple[int, int, int]] = []

    def schedule(ranks: int, stages: int, microbatches: int) -> graphpp.Schedule:
        made.append((ranks, stages, microbatches))
        return SCHEDULES["GPipe"](ranks, stages, microbatches)

    example = graphpp.Microbatch((X[:4],), {}, X[:4])
    memory = graphpp.Memory(cap=1 << 30)
    pipe = graphpp.compile(model(), F.mse_loss, split=2, schedule=schedule, microbatches=3, example=example, memory=memory)
    pipe.step(X, target=X)
    pipe.eval(X)
    pipe.step(X[:9], target=X[:9])
    assert made == [(1, 2, 3)]


def test_plan_and_programs_are_public() -> None:
    pipe = graphpp.compile(model(), F.mse_loss, split=2, microbatches=3)
    for look in (lambda: pipe.plan, lambda: pipe.programs(0)):
        with pytest.raises(graphpp.GraphPPError, match="nothing is captured yet"):
            look()
    pipe.step(X, target=X)
    assert [stage.rank for stage in pipe.plan.stages] == [0, 0]
    assert pipe.plan.schedule.microbatches == 3
    assert "tanh" in pipe.programs(0).programs[Phase.FORWARD].source
    with pytest.raises(graphpp.GraphPPError, match=r"no stage 2: stages are 0\.\.1"):
        pipe.programs(2)


def fails_alone(rank: int, phase: str) -> list[str]:
    """A step in which preparing the call fails on rank 1, and the functions of the trace; then a step that works."""
    errors = []
    pipe = graphpp.compile(model(), F.mse_loss, split=["2"], schedule="1F1B", microbatches=3)
    batch: Tensor = X
    with internals.failing_in(phase) if rank == 1 else internals.failing_in(None):
        try:
            pipe.step(batch, target=batch)
        except (ValueError, graphpp.GraphPPError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            errors.append(" ".join(frame.name for frame in traceback.extract_tb(error.__traceback__)))
    loss = pipe.step(batch, target=batch).loss
    return [*errors, "finite" if loss.isfinite() else "not finite"]


@pytest.mark.parametrize("phase", ["lowered", "compiled"])
def test_a_phase_that_fails_on_one_rank_fails_on_all(phase: str) -> None:
    good, bad = run_ranks(fails_alone, 2, phase)
    assert (bad[0], bad[2]) == (f"ValueError: {phase} fails", "finite")
    assert bad[1].endswith("prepare prepare _prepare " + ("_lower fail" if phase == "lowered" else "fail"))
    assert "<lambda>" not in bad[1]
    assert good[0].startswith("MismatchError") and f"rank 1: ValueError: {phase} fails" in good[0]
    assert good[2] == "finite"
