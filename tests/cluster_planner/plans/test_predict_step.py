"""The prediction of a setting: a long step is continued from two short ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphpp.cluster_planner.costs import Deployment
from graphpp.cluster_planner.plans.estimate import estimate
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction import read_tables
from graphpp.cluster_planner.plans.prediction.gradient_sums import SharedSeconds, shared_seconds
from graphpp.cluster_planner.plans.prediction.predict_step import costs_and_bound, order_costs, predict, tables_of
from graphpp.cluster_planner.plans.refine.moved_stages import moved_stages
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.cluster_planner.plans.training_plan import StepSeconds
from graphpp.devices import H100_SXM, Link, Machines
from graphpp.schedules.table.state_bytes import StateBytes
from tests.cluster_planner.plans.test_plan import LENGTH, costs
from tests.exhaustive import further

RANKS, MICROBATCHES = 2, 80


def request_of(batch: int = MICROBATCHES) -> PlanRequest:
    return PlanRequest(costs(torch.bfloat16, "cuda"), Machines.read("4xH100"), batch, LENGTH)


@pytest.mark.parametrize(
    ("choice", "keep"),
    [
        (ScheduleChoice("1F1B"), None),
        (ScheduleChoice("ZB1P"), None),
        (ScheduleChoice("ZBVZeroBubble", 2), None),
        (ScheduleChoice("DualPipeV", 2), None),
        (ScheduleChoice("V-Half", 2), None),
        (ScheduleChoice("Interleaved1F1B", 4), None),
        (ScheduleChoice("Interleaved1F1B", 4), 1),
        (ScheduleChoice("LoopedBFS", 4), 1),
        (ScheduleChoice("MegatronInterleaved", 2, 8), 1),
        (ScheduleChoice("ZB1P"), 0),
        (ScheduleChoice("DualPipeV", 2), 0),
        (ScheduleChoice("Interleaved1F1B", 4), 0),
    ],
    ids=str,
)
def test_a_long_step_is_that_of_the_whole_table(
    choice: ScheduleChoice, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = PlanSetting(MeshShape(pp=RANKS, dp_shard=2), 1, MICROBATCHES, choice, keep)
    monkeypatch.setattr(read_tables, "_WHOLE", 0)
    continued = predict(request_of(), setting)
    monkeypatch.setattr(read_tables, "_WHOLE", 10**9)
    whole = predict(request_of(), setting)
    assert continued is not None and whole is not None
    assert len(read_tables.counts_of(setting)) == 1, "the second one is simulated as a whole"
    assert continued.seconds.total == pytest.approx(whole.seconds.total, rel=0.01)
    assert continued.peaks == pytest.approx(whole.peaks, rel=0.01)
    assert continued.sent["dp_shard"] == pytest.approx(whole.sent["dp_shard"], rel=0.02)


@pytest.mark.parametrize("name", ["1F1B", *further("ZB1P")])
def test_programs_that_gather_single_layers_hide_no_exchanges(name: str) -> None:
    setting = PlanSetting(MeshShape(pp=RANKS, tp=2, dp_shard=2), 1, 16, ScheduleChoice(name), 0)
    known, slow = costs(torch.bfloat16, "cuda"), Link(1e-6, 3e8, 1.0, contention=0.2)  # gathers outlast computations
    machines, found = Machines(H100_SXM, 8, inside=slow), []
    for own in ((), ("backward",)):
        asked = PlanRequest(known, machines, 32, LENGTH, usual=Deployment(overlapped=own))
        step = predict(asked, setting)
        assert step is not None
        moved = moved_stages(asked, replace(step, cut=(0, 1)), 10**12)
        assert moved is not None
        found.append((step.seconds, *costs_and_bound(asked, setting, step.cut), moved.cut, moved.moved))
    assert found[0] == found[1]


def test_parts_of_overlapped_actions_that_gather_single_layers_take_their_sum() -> None:
    """They run one after the other: DualPipeV, some of whose backwards are split, computes no sooner than whole backwards."""
    asked = PlanRequest(costs(torch.bfloat16, "cuda"), Machines.read("8xH100"), 32, LENGTH)

    def seconds(name: str, keep: int | None) -> tuple[float, float]:
        setting = PlanSetting(MeshShape(pp=RANKS, tp=2, dp_shard=2), 1, 16, ScheduleChoice(name, 2), keep)
        found = predict(asked, setting)
        assert found is not None
        step = found.seconds
        return step.forward + step.backward + step.collectives, estimate(asked, setting).seconds

    computed, estimated = seconds("DualPipeV", 0)
    (whole, _), (split, least) = seconds("Interleaved1F1B", 0), seconds("ZBVZeroBubble", 0)
    assert seconds("DualPipeV", None)[0] < whole < computed < split
    assert estimated >= least


def test_orders_are_searched_with_the_waits_for_single_layers() -> None:
    setting = PlanSetting(MeshShape(pp=RANKS, dp_shard=2), 4, 8, ScheduleChoice("ZB1P"), 0)
    found, tables = predict(request_of(64), setting), tables_of(request_of(64), setting)
    assert found is not None and tables is not None
    known, _ = order_costs(request_of(64), setting, found.cut, tables[0])
    assert found.seconds.gradients > 0.0
    step = tables[0].times.seconds(known, collectives=False).makespan
    assert step == pytest.approx(found.seconds.total - found.seconds.optimizer)


def test_a_number_of_microbatches_that_the_schedule_does_not_take_has_no_prediction() -> None:
    setting = PlanSetting(MeshShape(pp=4), 1, 130, ScheduleChoice("Interleaved1F1B", 2))
    assert predict(request_of(130), setting) is None


@pytest.mark.parametrize("name", ["1F1B", "ZB2P", "V-Min"])
def test_a_long_step_on_more_ranks_is_that_of_the_whole_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many ranks that the shorter simulated step has fewer microbatches than twice the ranks."""
    per_rank = 1 if name in ("1F1B", "ZB1P", "ZB2P") else 2
    stages, choice = 10, ScheduleChoice(name, per_rank)
    pp = stages // per_rank if per_rank == 1 else 5
    setting = PlanSetting(MeshShape(pp=pp), 1, 60, choice)
    monkeypatch.setattr(read_tables, "_LEAST", 1)
    monkeypatch.setattr(read_tables, "_WHOLE", 0)
    continued = predict(request_of(60), setting)
    monkeypatch.setattr(read_tables, "_WHOLE", 10**9)
    whole = predict(request_of(60), setting)
    assert continued is not None and whole is not None
    assert continued.seconds.total == pytest.approx(whole.seconds.total, rel=0.01)
    assert continued.peaks == pytest.approx(whole.peaks, rel=0.01)


def test_bytes_sent_along_every_dimension_are_predicted() -> None:
    """Those of tensor parallelism grow with the microbatches; replicas sum their gradients, of half as many rows, once."""
    sent = []
    for tp, microbatches in ((1, 4), (2, 4), (2, 8)):
        setting = PlanSetting(MeshShape(pp=RANKS, dp_replicate=2, tp=tp), 1, microbatches, ScheduleChoice("1F1B"))
        found = predict(PlanRequest(costs(torch.bfloat16, "cuda"), Machines.read("8xH100"), 2 * microbatches, LENGTH), setting)
        assert found is not None
        sent.append(found.sent)
    whole, short, long = sent
    assert whole["tp"] == 0 < short["tp"] and long["tp"] == 2 * short["tp"]
    assert whole["dp_replicate"] > short["dp_replicate"] == long["dp_replicate"] > 0
    assert short["ep"] == short["cp"] == short["dp_shard"] == 0


def _predicted(shape: MeshShape, stages: int, keep: int | None = None, batch: int = 16, **usual: bool) -> StepSeconds:
    machines = replace(Machines.read("16xH100"), gpus=shape.ranks)
    request = PlanRequest(costs(torch.bfloat16, "cuda"), machines, batch, LENGTH, usual=Deployment(**usual))
    setting = PlanSetting(shape, 1, batch // shape.data_ranks, ScheduleChoice("auto", stages), keep)
    found = predict(request, setting)
    assert found is not None
    return found.seconds


def test_several_stages_of_one_rank_hide_their_gathers_and_reductions() -> None:
    sharded = MeshShape(dp_shard=16)
    one, several = (_predicted(sharded, stages) for stages in (1, 8))
    assert several.gradients < one.gradients
    assert several.forward == pytest.approx(one.forward, rel=1e-6)


def test_sums_over_copies_are_hidden_but_for_the_two_stages_that_are_reduced_last() -> None:
    machines, state = Machines.read("16xH100"), [StateBytes((0,), (0,), weights=100, sums=1600)]

    def shared(shape: MeshShape, stages: int = 1, keep: int | None = None, order: str = "any") -> SharedSeconds:
        setting = PlanSetting(shape, 1, 1, ScheduleChoice("auto", stages), keep)
        return shared_seconds(machines, setting, state, [False], order)

    whole, hybrid = MeshShape(dp_replicate=16), MeshShape(dp_replicate=2, dp_shard=8)
    over_copies, scattered = machines.all_reduce(200, 2, 8), machines.reduce_scatter(1600, 8)
    assert shared(whole).copies == (0.0,) and shared(whole).reductions == (machines.all_reduce(1600, 16),)
    assert shared(hybrid, 2).copies[0] == over_copies and shared(hybrid, 2).reductions[0] == scattered
    assert shared(hybrid, 8).copies[0] == over_copies / 4
    assert shared(hybrid, 8).reductions[0] == pytest.approx(scattered + over_copies * 3 / 4)
    assert shared(hybrid, 8, order="ranks") == shared(hybrid, 8), "two copies have no order"
    assert shared(whole, order="ranks").copies[0] == machines.all_reduce(1600, 16) / 2, "the second half is late"
    for four in (MeshShape(dp_replicate=4, dp_shard=4), MeshShape(dp_replicate=2, dp_shard=4, cp=2)):
        late, ordered = shared(four, 8).copies[0], shared(four, 8, order="ranks").copies[0]
        assert ordered == pytest.approx(late + (4 * late - late) / 2), "that of six stages, and two stages in full"
    assert shared(hybrid, 8, keep=0).copies[0] == over_copies and shared(hybrid, 8, keep=0).reductions[0] == 0.0
    assert shared(whole).contention == machines.between.contention, "an average over machines contends as they do"
    assert machines.between.contention < shared(hybrid, 8).contention < machines.inside.contention


def test_only_eager_programs_have_kernels_that_add_up_gradients() -> None:
    whole = MeshShape()
    few, many = (_predicted(whole, 1, batch=batch, compiled=False).backward / batch for batch in (1, 16))
    assert many > few, "the first microbatch has nothing to add to"
    assert _predicted(whole, 1, batch=16).backward / 16 == pytest.approx(_predicted(whole, 1, batch=1).backward)
