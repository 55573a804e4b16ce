"""Offload in plans: as little as fits, in place of recomputation where the link to the host allows it, and run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import graphpp
from graphpp import TrainingPlan, TrainingPlans
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.refine.least_memory import least_offload
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import CPU_CORE, Link, Machines
from graphpp.errors import NoPlanError, ScheduleError
from graphpp.units import spell_bytes
from tests import internals
from tests.cluster_planner.plans.test_plan import LENGTH, costs, trained
from tests.distributed import run_ranks

FAST, SLOW = 1e10, 2e7  # bytes/s between the device and the host
SETTING = PlanSetting(MeshShape(pp=2), 4, 8, ScheduleChoice("LoopedBFS", 2))


def machines(bandwidth: float | None) -> Machines:
    link = None if bandwidth is None else Link(0.0, bandwidth, 1.0)
    return Machines(replace(CPU_CORE, host=link), 2)


def predicted(offload: float | None, bandwidth: float = FAST, setting: PlanSetting = SETTING) -> Prediction:
    found = predict(request_of(bandwidth), replace(setting, offload=offload))
    assert found is not None
    return found


def request_of(bandwidth: float | None) -> PlanRequest:
    return PlanRequest(costs(None, "cpu"), machines(bandwidth), 32, LENGTH, None)


def plans(bandwidth: float | None, **options: Any) -> TrainingPlans:
    given = {"pp": 2, "param_dtype": None, "rows": 4, "batch": 32, "schedules": ["LoopedBFS"], "work": 20_000, **options}
    return graphpp.plan(costs(None, "cpu"), machines=machines(bandwidth), **given)


def test_offload_takes_bytes_and_a_slow_link_takes_time() -> None:
    none, half, every = (predicted(each) for each in (None, 0.5, 1.0))
    assert every.peak < half.peak < none.peak
    assert none.seconds.total == every.seconds.total - every.seconds.offload
    assert none.seconds.offload == 0.0
    slow = predicted(1.0, SLOW)
    assert slow.peaks == every.peaks
    copied = 8 * predicted(None).memory["activations"] / 100 / SLOW  # far less than all that is copied
    assert slow.seconds.offload > max(every.seconds.offload, copied)
    assert slow.seconds.total == pytest.approx(none.seconds.total + slow.seconds.offload)


def test_offloaded_values_take_a_machines_memory() -> None:
    none, half, every = (predicted(each) for each in (None, 0.5, 1.0))
    assert none.host == 0 < half.host < every.host
    freed = sum(before - after for before, after in zip(none.peaks, every.peaks, strict=True))
    assert every.host >= freed, "both ranks are in one machine"
    small = replace(machines(FAST), host_memory=half.host)
    options = {"pp": 2, "param_dtype": None, "rows": 4, "batch": 32, "schedules": ["LoopedBFS"], "recompute": [None]}
    found = graphpp.plan(costs(None, "cpu"), machines=small, memory_cap=none.peak - 1, **options)
    assert all(each.host <= half.host for each in found.plans) and found.best.host > 0
    assert f"offloaded values take {spell_bytes(found.best.host)} of a machine's memory" in str(found.best)
    with pytest.raises(NoPlanError):
        graphpp.plan(costs(None, "cpu"), machines=replace(small, host_memory=1), memory_cap=none.peak - 1, **options)
    with pytest.raises(ScheduleError, match=r"like: offload: a machine has .*: offload less, or give Machines\(host_memory=\)"):
        graphpp.plan(costs(None, "cpu"), machines=small, like={"offload": 1.0}, search=False, **options)


def test_the_devices_of_a_machine_share_its_memorys_bandwidth() -> None:
    device = replace(CPU_CORE, host=Link(0.0, 100.0, 0.5))
    rates = [Machines(device, gpus, host_bandwidth=120.0).host for gpus in (1, 2, 8)]
    assert [one.bandwidth * one.share for one in rates if one] == [50.0, 50.0, 15.0]
    assert Machines(CPU_CORE, 8).host is None


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_the_least_fraction_that_fits(share: float) -> None:
    none, every = predicted(None).peak, predicted(1.0).peak
    cap = round(every + share * (none - every))
    found = least_offload(request_of(FAST), SETTING, cap)
    assert found is not None and found.offload is not None
    assert predicted(found.offload).peak <= cap
    assert predicted(found.offload - 1 / 8 or None).peak > cap


def test_a_model_that_fits_by_offload_alone() -> None:
    cap = round(0.8 * predicted(None).peak)
    found = plans(FAST, memory_cap=cap, recompute=[None])
    assert found.best.setting.offload is not None and found.best.peak <= cap
    assert found.best == plans(FAST, memory_cap=cap, recompute=[None]).best
    assert f"offload {found.best.setting.offload:g}" in str(found.best)
    for other in ({"bandwidth": None}, {"bandwidth": FAST, "offload": False}):
        with pytest.raises(ScheduleError, match="no plan fits"):
            plans(**other, memory_cap=cap, recompute=[None])


def test_a_setting_whose_estimate_is_far_over_the_cap_is_tried_with_offload() -> None:
    setting = replace(SETTING, schedule=ScheduleChoice("ZBVZeroBubble", 2))
    none, every = (predicted(each, setting=setting).peak for each in (None, 1.0))
    best = plans(FAST, memory_cap=(none + every) // 2, recompute=[None], schedules=["ZBVZeroBubble"]).best
    assert best.setting.offload is not None and best.peak < none


def test_the_link_decides_between_offload_and_recomputation() -> None:
    cap = round(0.8 * predicted(None).peak)
    fast, slow = (plans(each, memory_cap=cap, recompute=[None, "full"]).best for each in (FAST, SLOW))
    assert fast.setting.offload is not None and fast.setting.recompute is None
    assert slow.setting.offload is None and slow.setting.recompute is not None


def trained_on_a_device(rank: int, plan: TrainingPlan) -> dict[str, Any]:
    """As `trained`, on processes whose offloaded values count as away."""
    with internals.freeing_memory():
        return trained(rank, plan)


@pytest.mark.exhaustive
def test_offload_takes_as_many_bytes_from_a_pipeline_as_from_its_prediction() -> None:
    """Values that wait in messages are predicted by an upper bound, with and without offload alike."""
    best = plans(FAST, memory_cap=round(0.8 * predicted(None).peak), recompute=[None]).best
    assert best.setting.offload is not None
    assert TrainingPlan.from_json(best.to_json()) == best
    without = plans(FAST, memory_cap=2**33, recompute=[None]).where(
        lambda each: each.setting == replace(best.setting, offload=None)
    ).best
    for with_it, alone in zip(run_ranks(trained_on_a_device, 2, best), run_ranks(trained_on_a_device, 2, without), strict=True):
        assert with_it["loss"] == alone["loss"]
        real = [before - after for before, after in zip(alone["peaks"], with_it["peaks"], strict=True)]
        assert real == [before - after for before, after in zip(without.peaks, best.peaks, strict=True)]
        assert min(real) > 0


@pytest.mark.parametrize("wrong", [0, 1.5, True, "all"])
def test_a_fraction_lies_between_0_and_1(wrong: Any) -> None:
    with pytest.raises(ScheduleError, match="offload: take a fraction above 0 and up to 1"):
        replace(SETTING, offload=wrong)
