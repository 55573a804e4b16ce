"""Searched orders: a plan may have one where it is faster than every named schedule, as data, and runs by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphpp import Schedule, TrainingPlan
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.refine.better_orders import MOST_SEARCHED, searched_order
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice
from graphpp.devices import Machines
from graphpp.errors import ScheduleError
from tests.cluster_planner.plans.test_plan import LENGTH, costs, plans, trained
from tests.distributed import run_ranks

SETTING = PlanSetting(MeshShape(pp=2), 4, 4, ScheduleChoice("1F1B"))
OPTIONS = {"machines": "2xCPU", "pp": 2, "param_dtype": None, "rows": 4, "batch": 16, "memory_cap": 2**33, "work": 20_000}


def request_of() -> PlanRequest:
    return PlanRequest(costs(None, "cpu"), Machines.read("2xCPU"), 16, LENGTH, None)


def predicted(setting: PlanSetting) -> Prediction:
    found = predict(request_of(), setting)
    assert found is not None
    return found


def test_an_order_is_not_slower_than_the_schedule_and_fits() -> None:
    named = predicted(SETTING)
    for cap in (2**33, named.peak):
        found = searched_order(request_of(), named, cap)
        assert found is not None and found.setting.schedule.name == ORDER
        assert found == predict(request_of(), found.setting, named.cut)
        assert found.peak <= cap
        assert found.seconds.total <= named.seconds.total * (1 + 1e-9)
        assert replace(found.setting, schedule=SETTING.schedule) == SETTING


def test_long_steps_and_single_ranks_and_little_memory_have_no_order() -> None:
    assert searched_order(request_of(), predicted(replace(SETTING, microbatches=MOST_SEARCHED)), 2**33) is None
    assert searched_order(request_of(), predicted(PlanSetting(MeshShape(), 4, 4, ScheduleChoice("auto"))), 2**33) is None
    assert searched_order(request_of(), predicted(SETTING), 1000) is None


@pytest.mark.exhaustive
def test_the_best_plan_may_have_an_order_that_comes_back_from_json_and_runs() -> None:
    named = plans(**OPTIONS, schedules=["1F1B"]).best
    found = plans(**OPTIONS, schedules=["1F1B", ORDER])
    best = found.best
    assert best.setting.schedule.name == ORDER and best.step_seconds < named.step_seconds
    assert best == plans(**OPTIONS, schedules=["1F1B", ORDER]).best
    assert TrainingPlan.from_json(best.to_json()) == best
    assert any(each.setting == named.setting and "slower by" in each.reason for each in found)
    assert best.table() == Schedule.parse(best.setting.schedule.order or "")
    for ran in run_ranks(trained, 2, best):
        assert ran["schedule"] == ORDER and ran["starts"] == list(best.split)
        for real, expected in zip(ran["peaks"], best.peaks, strict=True):
            # As in test_plan.py; halves of a backward that two segments hold count twice, too.
            assert 0.995 * real <= expected <= 1.2 * real


def test_an_order_belongs_to_its_name_and_its_numbers() -> None:
    text = str(SETTING.schedule.table(2, 4))
    with pytest.raises(ScheduleError, match='order: a schedule "searched" has the text of its table'):
        ScheduleChoice(ORDER)
    assert predict(request_of(), replace(SETTING, schedule=ScheduleChoice(ORDER, order=text), microbatches=8)) is None


def test_orders_can_be_left_out() -> None:
    found = plans(**OPTIONS, schedules=["1F1B", "ZB1P"])
    assert {each.setting.schedule.name for each in found} == {"1F1B", "ZB1P"}
    with pytest.raises(ScheduleError, match="schedules: take a list of names"):
        plans(**OPTIONS, schedules=[ORDER])
