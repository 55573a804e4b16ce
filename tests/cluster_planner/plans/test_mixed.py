"""Plans for jobs of unlike devices: cut by speed and by memory, and never slower than some of the devices alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import graphpp
from graphpp import TrainingPlan, TrainingPlans
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import predict
from graphpp.cluster_planner.plans.refine.cut_by_memory import predict_within
from graphpp.cluster_planner.plans.refine.least_memory import least_recompute
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import CPU_CORE, H100_SXM, Device, Machines, MixedMachines, known_device, read_machines
from graphpp.errors import NoPlanError, ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.placement import usual_stages
from graphpp.units import spell_bytes
from tests.cluster_planner.plans.test_plan import LENGTH, costs, plans, trained
from tests.distributed import run_ranks

SLOW = replace(CPU_CORE, name="slow", launch=0.0)
FAST = replace(
    SLOW, name="fast", flops={name: 3 * each for name, each in SLOW.flops.items()}, memory_bandwidth=3 * SLOW.memory_bandwidth
)
TWO = PlanSetting(MeshShape(pp=2, dp_replicate=2), 2, 8, ScheduleChoice("1F1B"))


def known(name: str) -> Device:
    found = known_device(name)
    assert found is not None
    return found


def request_on(*groups: Machines, caps: tuple[int, ...] = ()) -> PlanRequest:
    return PlanRequest(costs(None, "cpu"), MixedMachines(groups, caps), 32, LENGTH, None)


def soonest(found: TrainingPlans) -> float:
    return min(each.step_seconds for each in found if each.over(found.cap or 0) <= 0)


def test_no_plan_on_some_groups_exceeds_their_caps() -> None:
    for cap, alone in ((2_000_000, True), (400_000, False)):
        caps = {"H100_SXM": 10**9, "A100": cap}
        found = plans("4xH100 + 4xA100", memory_cap=[*caps.values()], work=1500, schedules=["1F1B"])
        fitting = [each for each in found if each.over(found.cap or 0) <= 0]
        assert ("4xA100" in {each.machines for each in fitting}) == alone and len(fitting) > 5
        for each in fitting:
            assert all(peak <= caps[name] for peak, name in zip(each.peaks, each.devices, strict=True)), each.machines


@pytest.mark.parametrize("order", [(FAST, SLOW), (SLOW, FAST)], ids=["fast first", "slow first"])
def test_stages_are_cut_by_the_speed_of_their_devices(order: tuple[Device, ...]) -> None:
    request = request_on(*(Machines(device, 2) for device in order))
    (cut, *_), alike = request.stages(TWO), request_on(Machines(SLOW, 4)).stages(TWO).cut
    parts = request.priced(TWO.shape, TWO.rows, None).segments.costs.stages
    each = [part.forward + part.input_grad + part.weight_grad for part in parts]
    work = [sum(each[first:end]) for first, end in pairwise((*cut, len(each)))]
    fast = order.index(FAST)
    assert abs(work[fast] - 3 * work[1 - fast]) <= 4 * max(each) < work[fast]
    assert (cut > alike) == (fast == 0)
    found, plain = predict(request, TWO), predict(request_on(Machines(SLOW, 4)), TWO)
    assert found is not None and plain is not None and 0.5 < found.seconds.total / plain.seconds.total < 0.65


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        (ScheduleChoice("1F1B"), {"keep": 0}),
        (ScheduleChoice("ZBVZeroBubble", 2), {"recompute": "full", "recomputed": (2, 0, 1, 1, 0, 1, 1, 0)}),
        (ScheduleChoice("DualPipeV", 2), {"offload": 0.5}),
        (ScheduleChoice("Interleaved1F1B", 2), {"keep": 1}),
        (ScheduleChoice("1F1B"), {"word_parts": False, "logits_tokens": 16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [True, False])
def test_equal_devices_in_groups_are_priced_as_one(choice: ScheduleChoice, options: dict[str, Any], compiled: bool) -> None:
    setting = PlanSetting(MeshShape(pp=4, dp_replicate=2, dp_shard=2), 1, 8, choice, **options)
    usual = PlanRequest(costs(torch.bfloat16, "cuda"), Machines(H100_SXM, 16, 4), 32, LENGTH)
    usual = replace(usual, usual=replace(usual.usual, compiled=compiled))
    half = Machines(H100_SXM, 8, 4)
    one, two = predict(usual, setting), predict(usual.on(MixedMachines((half, half))), setting)
    assert one is not None and two is not None and two.caps == (72 * 10**9,) * 4
    assert replace(two, caps=(), seconds=one.seconds) == one
    assert asdict(two.seconds) == pytest.approx(asdict(one.seconds), rel=1e-12)


def test_groups_that_fill_up_alike_machines_give_the_plans_of_one() -> None:
    one, two = plans("16xH100", batch=32, work=500), plans("8xH100 + 8xH100", batch=32, work=500)
    assert one.to_json() == two.to_json()
    assert isinstance(read_machines("4xH100 + 4xH100"), MixedMachines), "their links lead out of the machine"


@pytest.mark.parametrize("text", ["8xH100 + 8xA100", "4xH100 + 2xMI300X", "8xH100 + 1xA100"])
def test_a_mixed_job_is_not_slower_than_its_groups_alone(text: str) -> None:
    usual = {"batch": 32, "work": 2_000, "rows": [1, 2], "schedules": ["auto", "1F1B", "ZB1P"]}
    mixed = plans(text, **usual)
    assert soonest(mixed) <= min(soonest(plans(each, **usual)) for each in text.split(" + ")) * (1 + 1e-9)
    assert mixed.best.step_seconds <= 1.02 * soonest(mixed) and mixed.asked["machines"] == str(read_machines(text))


def test_groups_that_differ_in_memory_alone_are_not_slower_than_all_with_the_least() -> None:
    mixed, usual = read_machines("8xH100@16GB + 8xH100@24GB"), {"batch": 32, "work": 2_000, "rows": [1, 2]}
    assert isinstance(mixed, MixedMachines) and mixed.as_one == MixedMachines((Machines(known("H100@16GB"), 16),))
    assert soonest(plans(mixed, **usual)) <= soonest(plans("16xH100@16GB", **usual)) * (1 + 1e-9)
    own = plans(mixed, like="dp_shard 16, 2 rows", search=False, **usual | {"rows": None}).yours
    assert own is not None and own.machines == "16xH100_SXM@16GB"
    others = "8xH100 + 8xH200", "4xH100@16GB + 4xH100", "8xH100@400W + 8xH100@16GB"
    assert not any(each.as_one for each in map(read_machines, others) if isinstance(each, MixedMachines))


def test_more_memory_or_speed_for_one_group_is_not_slower() -> None:
    usual = {"batch": 32, "work": 20_000, "rows": [1, 2], "pp": [2, 4], "tp": 1, "schedules": ["1F1B", "ZB1P"]}
    free = plans("4xH100@400W + 4xA100", **usual)
    tight = [round(0.6 * free.best.peak), round(0.5 * free.best.peak)]
    steps = [
        soonest(plans(text, memory_cap=caps, **usual))
        for text, caps in (
            ("4xH100@400W + 4xA100", tight), ("4xH100@400W + 4xA100", [tight[0], 2 * tight[1]]),
            ("4xH100@400W + 4xA100", [4 * tight[0], 2 * tight[1]]), ("4xH100 + 4xA100", [4 * tight[0], 2 * tight[1]]),
        )
    ]  # fmt: skip
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


@pytest.mark.parametrize("choice", [ScheduleChoice("1F1B"), ScheduleChoice("ZBVZeroBubble", 2)], ids=str)
def test_stages_are_cut_by_memory_where_the_cut_by_speed_does_not_fit(choice: ScheduleChoice) -> None:
    setting = replace(TWO, schedule=choice)
    machines = Machines(SLOW, 2), Machines(replace(SLOW, name="large"), 2)
    even = predict(request_on(*machines), setting)
    assert even is not None
    caps = round(0.7 * even.peaks[0]), 2 * even.peaks[1]
    request = request_on(*machines, caps=caps)
    found = predict_within(request, setting, max(caps))
    assert found is not None and found.over(0) <= 0 < replace(even, caps=caps).over(0)
    assert found.cut != even.cut and found.seconds.total > even.seconds.total
    least = least_recompute(request, replace(setting, recompute="full"), max(caps))
    assert least is not None
    within = predict(request, *least)
    assert within is not None and all(peak <= cap for peak, cap in zip(within.peaks, caps, strict=True))


def test_a_plan_says_what_is_where_and_runs_there() -> None:
    found = plans("1xCPU + 1xCPU@4GB", batch=8, pp=2, param_dtype=None, schedules=["1F1B"])
    best = found.best
    assert sorted(best.devices) == ["CPU_CORE", "CPU_CORE@4GB"] and set(best.caps) == {7_200_000_000, 3_600_000_000}
    assert best.machines.split(" + ") == [f"1x{name}" for name in best.devices]
    assert f"pipeline ranks 0 on {best.devices[0]}, {spell_bytes(best.peaks[0])} of {spell_bytes(best.caps[0])}; 1" in str(best)
    assert TrainingPlans.from_json(found.to_json()) == found and best.machines in str(found)
    like = TrainingPlan.from_json(best.to_json())
    again = plans("1xCPU + 1xCPU@4GB", batch=8, param_dtype=None, like=like, search=False).yours
    assert again is not None and replace(again, reason=best.reason, on_front=best.on_front) == best
    assert tuple(graphpp.Memory(cap=best.caps).caps(2) or ()) == best.caps
    for ran in run_ranks(trained, 2, best):
        assert ran["starts"] == list(best.split)


def test_what_cannot_be_planned_names_the_device_or_the_group() -> None:
    message = r"memory_cap=1,000 bytes: .* on 6xA100 \+ 2xH100_SXM, .* fullest rank, A100, .* fits on 128xH100_SXM \+ 512xA100"
    with pytest.raises(NoPlanError, match=message):
        plans("2xH100 + 6xA100", memory_cap=[10**9, 1_000], pp=4, work=500, schedules=["1F1B"])
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("8xH100 + 1xCPU", {}, "groups: one job has devices of one type of torch, got cpu and cuda"),
        ("8xH100 + 8xA100", {"memory_cap": [1, 2, 3]}, "memory_cap: take a number of bytes for each of 2 groups"),
        ("8xH100 + 4xA100", {"like": "pp 2, 1F1B", "batch": 12}, "like: pp 2 gives a pipeline rank 6 GPUs, which do not"),
        ("1xH100 + 1xH200 + 1xA100 + 1xB200", {}, r"machines: take at most 3 groups, got 1xH100_SXM \+ 1xH200"),
        ("8xH100 + 8xToaster", {}, "machines: .*devices are"),
    ]  # fmt: skip
    for text, options, message in refused:
        with pytest.raises(ScheduleError, match=message):
            plans(text, **options)
    halves = Machines(replace(H100_SXM, name="halves", flops={"float16": 1e15}), 8)
    with pytest.raises(ScheduleError, match="dtype: halves has peak FLOP/s of float16, not of bfloat16"):
        graphpp.plan(costs(torch.bfloat16, "cuda"), machines=MixedMachines((Machines(H100_SXM, 8), halves)), batch=32)


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"ForwardOnly"}))
def test_the_ranks_of_stages_are_those_of_the_table(name: str) -> None:
    choice = ScheduleChoice(name, usual_stages(SCHEDULES[name], 4) // 4)
    table = choice.table(4, 8)
    for each in (choice, replace(choice, order=str(table))):
        assert dict(enumerate(each.homes(4))) == table.rank_of_stage
    assert set(ScheduleChoice("auto", 8).homes(1)) == {0}
