"""The search over schedule, group and keep: its best against all others, its reasons, and its use in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp import Costs, StageCosts, StateBytes
from graphpp.runtime.program_costs import costs_of_programs
from graphpp.schedules.generate.megatron_interleaved import legal_groups, megatron_interleaved
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.simulate.simulator import simulate
from tests import internals
from tests.distributed import run_ranks

RANKS, STAGES, MICROBATCHES = 2, 4, 8


def costs(saved: int = 10, **more: Any) -> Costs:
    return Costs((StageCosts(1.0, 1.0, 1.0, saved_bytes=saved),) * STAGES, **more)


def state(weights: int = 1000) -> list[StateBytes]:
    return [StateBytes((s,), (s,), weights=weights, sums=weights, optimizer=2 * weights) for s in range(STAGES)]


def searched(saved: int = 10, weights: int = 1000, cap: int | None = None, **more: Any) -> graphpp.PlanSearch:
    more = {"shards": 4, "bandwidth": 4000.0, **more}
    return graphpp.plan_auto(costs(saved), state(weights), cap, ranks=RANKS, microbatches=MICROBATCHES, **more)


def test_nothing_that_fits_is_faster_than_the_best() -> None:
    line = costs(gathers=(0.1875,) * STAGES, reductions=(0.1875,) * STAGES)  # 3 of 4 parts of 1000 bytes at 4000 a second
    everything = searched()
    for cap in (None, *sorted({each.peak for each in everything.candidates})):
        found = searched(cap=cap)
        fits = [each for each in everything.candidates if cap is None or each.peak <= cap]
        assert found.best.seconds == pytest.approx(min(each.seconds for each in fits))
        assert cap is None or found.best.peak <= cap
        assert {each.reason == "" for each in found.candidates[1:]} == {False} and found.best.reason == ""
    for each in everything.candidates:
        assert each.seconds == pytest.approx(simulate(place_shards(each.schedule, each.keep), line).makespan)


def test_every_named_schedule_and_group_is_a_candidate_with_every_keep() -> None:
    found = {(tuple(filter(None, row)), each.keep) for each in searched().candidates for row in each.schedule.table[:1]}
    groups = [megatron_interleaved(RANKS, STAGES, MICROBATCHES, group=group) for group in legal_groups(RANKS, MICROBATCHES)]
    names = ("LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "V-Min")
    named = [SCHEDULES[name](RANKS, STAGES, MICROBATCHES) for name in names]
    for table in (*groups, *named):
        assert all((tuple(filter(None, table.table[0])), keep) in found for keep in (None, 1, 2)), table.name
    dual = [each.keep for each in searched().candidates if each.name == "DualPipeV"]
    assert sorted(dual, key=str) == [2, None]  # an overlap computes with two stages at once


def test_weights_that_do_not_fit_whole_are_gathered_breadth_first() -> None:
    """Four stages a rank, small activations, a slow line: a cap that admits one whole stage leaves the fewest gathers."""
    stages = 8
    small, line = Costs((StageCosts(saved_bytes=1),) * stages), {"ranks": 2, "microbatches": 8, "shards": 64, "bandwidth": 1e5}
    heavy = [StateBytes((s,), (s,), weights=100_000, sums=100_000) for s in range(stages)]
    free = graphpp.plan_auto(small, heavy, **line)  # type: ignore[arg-type]
    assert free.best.gathers == 1
    tight = min(each.peak for each in free.candidates)
    found = graphpp.plan_auto(small, heavy, round(1.01 * tight), **line)  # type: ignore[arg-type]
    assert (found.best.name, found.keep, found.best.gathers) == ("LoopedBFS", 1, 1.75)
    others = [each for each in found.candidates if each.keep == 1 and each.peak <= 1.01 * tight]
    assert any(each.name == "Interleaved1F1B" and each.gathers > 4 for each in others)


def test_large_activations_rule_breadth_first_out() -> None:
    found = searched(saved=10_000, weights=10, cap=90_000)
    reasons = {(each.name, each.keep): each.reason for each in found.candidates}
    assert reasons["LoopedBFS", None].endswith("bytes over the cap on rank 0")
    loser = next(each for each in found.candidates if (each.name, each.keep) == ("LoopedBFS", None))
    assert reasons["LoopedBFS", None] == f"{loser.memory.ranks[0].peak - 90_000:,} bytes over the cap on rank 0"
    assert found.best.peak <= 90_000


def test_losers_say_why() -> None:
    found = searched()
    for each in found.candidates[1:]:
        slower = each.seconds > found.best.seconds * (1 + 1e-8)
        assert each.reason.startswith("slower by" if slower else "as fast"), each.reason
    assert "best" in str(found) and "more in .candidates" in str(found)


def test_without_shards_each_table_stands_once() -> None:
    found = searched(shards=1)
    assert {each.keep for each in found.candidates} == {None}
    assert {(each.gathers, each.sent) for each in found.candidates} == {(0, 0)}
    assert found.best.memory.ranks[0].weights == 2000


def test_equal_arguments_give_equal_results() -> None:
    one, other = searched(cap=20_000), searched(cap=20_000)
    assert one == other and str(one) == str(other)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(graphpp.NoPlanError, match=r"memory_cap admits no plan: the closest, .* takes [\d,]+ bytes more"):
        searched(cap=100)
    with pytest.raises(graphpp.ScheduleError, match="no named schedule takes 3 stages on 2 ranks"):
        graphpp.plan_auto(Costs.unit(3, 1), [], ranks=2, microbatches=4)
    with pytest.raises(graphpp.ScheduleError, match="state: there is no stage 4, the costs are of 4 stages"):
        graphpp.plan_auto(costs(), [StateBytes((4,))], ranks=2, microbatches=4)
    with pytest.raises(graphpp.ScheduleError, match=r"bandwidth: take a positive number of bytes per second, or None, got 0"):
        searched(bandwidth=0)
    with pytest.raises(graphpp.ScheduleError, match=r"state: take a list of graphpp\.StateBytes"):
        graphpp.plan_auto(costs(), 3, ranks=2, microbatches=4)  # type: ignore[arg-type]


def run_found(rank: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    usual = {"split": ["1", "2", "3"], "mesh": mesh, "microbatches": 8}
    meant = graphpp.Parallel(keep=1)
    pipe = graphpp.compile(nn.Sequential(*layers), F.mse_loss, schedule="Interleaved1F1B", parallel=meant, **usual)
    pipe.step(x, target=x)
    assert pipe.plan.memory is not None
    lowered = internals.last_lowered(pipe)
    known = costs_of_programs(lowered.programs[0], lowered.table.flow)
    found = graphpp.plan_auto(known, pipe.plan.memory.state, ranks=2, microbatches=8, shards=2, bandwidth=1e6)
    same = next(each for each in found.candidates if (each.name, each.keep) == ("Interleaved1F1B", 1))
    assert same.memory.ranks == pipe.plan.memory.ranks
    assert pipe.plan.sharding is not None
    assert same.sent == max(each.sent for each in pipe.plan.sharding.ranks)
    best = graphpp.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), F.mse_loss,
        schedule=found.schedule, parallel=graphpp.Parallel(keep=found.keep), **usual,
    )  # fmt: skip
    best.step(x, target=x)
    assert best.plan.memory is not None
    for own, foretold in zip(best.plan.memory.ranks, found.best.memory.ranks, strict=True):
        assert (own.weights, own.gradients, own.shards) == (foretold.weights, foretold.gradients, foretold.shards)


def test_what_is_found_is_what_the_pipeline_plans() -> None:
    run_ranks(run_found, 4)
