"""Plans of measured costs: the best against all others, their reasons, and their use in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp import Costs, StageCosts, StateBytes, TrainingPlan, TrainingPlans
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


def plans(saved: int = 10, weights: int = 1000, cap: int | list[int] | None = None, **more: Any) -> TrainingPlans:
    given = {"dp_shard": 4, "bandwidth": 4000.0, "costs": costs(saved), "state": state(weights), "rows": 2, **more}
    batch = given["rows"] * MICROBATCHES * given["dp_shard"]
    return graphpp.plan(batch=batch, memory_cap=cap, pp=RANKS, **given)


@pytest.mark.exhaustive
def test_nothing_that_fits_is_faster_than_the_best() -> None:
    line = costs(gathers=(0.1875,) * STAGES, reductions=(0.1875,) * STAGES)  # 3 of 4 parts of 1000 bytes at 4000 a second
    everything = plans()
    for cap in (None, *sorted({each.peak for each in everything})):
        found = plans(cap=cap)
        fits = [each for each in everything if cap is None or each.peak <= cap]
        assert found.best.step_seconds == pytest.approx(min(each.step_seconds for each in fits))
        assert cap is None or found.best.peak <= cap
        assert found.best.reason == "" and all(each.reason for each in found.plans[1:])
    for each in everything:
        running = place_shards(each.table(), each.setting.keep)
        assert each.step_seconds == pytest.approx(simulate(running, line).makespan)
        slower = each.step_seconds > everything.best.step_seconds * (1 + 1e-8)
        assert each.reason.startswith("slower by" if slower else "as fast") or each is everything.best
    assert everything == plans() and "best" in str(everything) and "MFU -" in str(everything)


def test_every_named_schedule_and_group_is_tried_with_every_keep() -> None:
    found = {(tuple(filter(None, each.table().table[0])), each.setting.keep) for each in plans()}
    groups = [megatron_interleaved(RANKS, STAGES, MICROBATCHES, group=group) for group in legal_groups(RANKS, MICROBATCHES)]
    names = ("LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "V-Min")
    for table in (*groups, *(SCHEDULES[name](RANKS, STAGES, MICROBATCHES) for name in names)):
        assert all((tuple(filter(None, table.table[0])), keep) in found for keep in (None, 1, 2)), table.name
    dual = [each.setting.keep for each in plans() if each.setting.schedule.name == "DualPipeV"]
    assert sorted(dual, key=str) == [2, None]  # an overlap computes with two stages at once
    assert {each.setting.schedule.name for each in plans(schedules=["V-Min"])} == {"V-Min"}


def test_weights_that_do_not_fit_whole_are_gathered_breadth_first() -> None:
    """Four stages a rank, small activations, a slow line: a cap that admits one whole stage leaves the fewest gathers."""
    stages = 8
    heavy = [StateBytes((s,), (s,), weights=100_000, sums=100_000) for s in range(stages)]
    given = {"costs": Costs((StageCosts(saved_bytes=1),) * stages), "state": heavy, "dp_shard": 64, "bandwidth": 1e5}
    tight = min(each.peak for each in plans(**given))
    best = plans(cap=round(1.01 * tight), **given).best
    assert (best.setting.schedule.name, best.setting.keep) == ("LoopedBFS", 1)


def test_each_rank_may_have_a_cap_of_its_own() -> None:
    """The first rank of 1F1B holds more microbatches than the last one."""
    given: dict[str, Any] = {"saved": 5_000, "schedules": ["Interleaved1F1B"]}
    first, last = plans(**given).best.peaks
    assert first > last and plans(cap=[first, last], **given).best.peaks == (first, last)
    with pytest.raises(graphpp.NoPlanError, match=f"memory_cap={last:,} bytes: .* on its fullest rank, .* too much"):
        plans(cap=[last, first], **given)
    with pytest.raises(graphpp.ScheduleError, match="memory_cap: take one number of bytes, or one for each of 2"):
        plans(cap=[last, first, first])


def test_activations_over_the_cap_are_named() -> None:
    found = plans(saved=10_000, weights=10, cap=90_000)
    loser = next(each for each in found if (each.setting.schedule.name, each.setting.keep) == ("LoopedBFS", None))
    assert loser.reason.endswith("over the cap, most of it activations") and found.best.peak <= 90_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"costs": Costs.unit(3, 1), "state": []}, "no schedule takes 3 stages on 2 ranks"),
        ({"state": [StateBytes((4,))]}, "state: there is no stage 4, the costs are of 4 stages"),
        ({"state": 3}, r"state: take a list of graphpp\.StateBytes"),
        ({"bandwidth": 0}, "bandwidth: take a positive number of bytes per second, or None, got 0"),
        ({"pp": [1, 2]}, "pp: beside costs= give one number"),
        ({"batch": 3}, "batch: take a multiple of 2 rows on 4 ranks"),
        ({"machines": "8xH100"}, "machines: it has no effect beside costs=: leave one of the two out"),
        ({"loss": F.mse_loss}, "loss: it has no effect beside costs="),
        ({"optimizer": "sgd"}, "optimizer: it has no effect beside costs="),
        ({"param_dtype": None}, "param_dtype: it has no effect beside costs="),
        ({"offload": False, "work": 10}, "offload: it has no effect beside costs="),
        ({"costs": None, "model": nn.Linear(2, 2), "machines": "8xH100"}, "state: it has no effect beside machines="),
        ({"costs": None}, "plan: give a model and machines="),
        ({"memory_cap": 100}, "memory_cap=100 bytes: no plan fits; the closest, .* takes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    usual = {"costs": costs(), "state": state(), "batch": 64, "rows": 2, "pp": RANKS, "dp_shard": 4, "bandwidth": 4000.0}
    with pytest.raises(graphpp.ScheduleError, match=message):
        graphpp.plan(**{**usual, **given})


def run_found(rank: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    usual = {"split": ["1", "2", "3"], "mesh": mesh}
    meant = graphpp.Parallel(keep=1)
    pipe = graphpp.compile(
        nn.Sequential(*layers), F.mse_loss, schedule="Interleaved1F1B", parallel=meant, microbatches=8, **usual
    )
    pipe.step(x, target=x)
    assert pipe.plan.memory is not None
    lowered = internals.last_lowered(pipe)
    known = costs_of_programs(lowered.programs[0], lowered.table.flow)
    given = {"costs": known, "state": pipe.plan.memory.state, "pp": 2, "dp_shard": 2, "bandwidth": 1e6}
    found = graphpp.plan(batch=32, rows=2, **given)
    same = next(each for each in found if (each.setting.schedule.name, each.setting.keep) == ("Interleaved1F1B", 1))
    assert same.peaks == tuple(each.peak for each in pipe.plan.memory.ranks)
    assert pipe.plan.sharding is not None
    assert same.sent["dp_shard"] == max(each.sent for each in pipe.plan.sharding.ranks)
    best = graphpp.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), F.mse_loss,
        plan=TrainingPlan.from_json(found.best.to_json()), **usual,
    )  # fmt: skip
    best.step(x, target=x)
    assert best.plan.memory is not None and best.plan.schedule.name == found.best.table().name
    assert [each.weights for each in best.plan.memory.ranks][:1] == [found.best.memory["weights"]]


@pytest.mark.exhaustive
def test_a_pipeline_runs_by_a_plan_of_its_own_costs() -> None:
    run_ranks(run_found, 4)
