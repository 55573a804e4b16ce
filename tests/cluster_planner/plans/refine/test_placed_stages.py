"""Other stages on other ranks: faster than named schedules where a head outweighs the layers, as data, and run as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp import TrainingPlan
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.plans.find import facts_of
from graphpp.cluster_planner.plans.found_plans import plan_of
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.refine.placed_stages import placed_stages
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import Machines
from graphpp.errors import ScheduleError
from graphpp.schedules.search.scheduler import schedule_auto
from tests.cluster_planner.plans.test_plan import LENGTH, WIDTH, Decoder, costs, example, loss, trained
from tests.distributed import run_ranks

HOME = {0: 1, 1: 0, 2: 0, 3: 1, 4: 0}  # three stages and two, of which two are neighbours
SETTING = PlanSetting(MeshShape(pp=2), 4, 4, ScheduleChoice("1F1B"))


def heavy() -> ModelCosts:
    with torch.device("meta"):
        model = Decoder()
        model.head = nn.Linear(WIDTH, 4096)
    return capture_costs(model, loss, example(), param_dtype=None, device_type="cpu")


def request_of(known: ModelCosts, ranks: int = 2) -> PlanRequest:
    return PlanRequest(known, Machines.read(f"{ranks}xCPU"), 16, LENGTH, None)


def placed() -> Prediction:
    table = schedule_auto(graphpp.Costs.unit(5), ranks=2, microbatches=4, placement=HOME, effort=0.05, name="searched")
    found = predict(request_of(costs(None, "cpu")), replace(SETTING, schedule=ScheduleChoice.of(table)), (0, 2, 4, 6, 8))
    assert found is not None
    return found


def plan() -> TrainingPlan:
    found = placed()
    return plan_of(found, facts_of(request_of(costs(None, "cpu")), found))


def test_a_heavy_head_gets_a_rank_with_less_beside_it() -> None:
    request = request_of(heavy(), 4)
    named = [replace(SETTING, shape=MeshShape(pp=4), microbatches=8, rows=2, schedule=ScheduleChoice(*each)) for each in (
        ("1F1B", 1), ("ZB1P", 1), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 2)
    )]  # fmt: skip
    fastest = min(filter(None, (predict(request, each) for each in named)), key=lambda each: each.seconds.total)
    found = placed_stages(request, fastest, 2**33)
    assert found is not None and found.seconds.total < 0.995 * fastest.seconds.total
    assert found == predict(request, found.setting, found.cut)
    assert placed_stages(request, fastest, 1000) is None


def test_unlike_numbers_of_stages_are_data_and_priced_alike_everywhere() -> None:
    made = plan()
    assert made.setting.stages == 5 and made.setting.schedule.stages_per_rank == 3
    assert "stages of each rank: 1 2 4 | 0 3" in str(made)
    assert TrainingPlan.from_json(made.to_json()) == made
    options: Any = {"machines": "2xCPU", "param_dtype": None, "batch": 16, "memory_cap": 2**33}
    again = graphpp.plan(costs(None, "cpu"), like=made.to_json(), search=False, **options).yours
    assert again is not None
    assert (again.setting, again.step_seconds, again.peaks, again.split) == (
        made.setting, made.step_seconds, made.peaks, made.split
    )  # fmt: skip
    found = placed()
    for wrong in ({"stages": 4}, {"stages_per_rank": 2}, {"order": None, "name": "1F1B"}):
        with pytest.raises(ScheduleError, match="stages"):
            replace(found.setting.schedule, **wrong).table(2, 4)  # type: ignore[arg-type]


def test_ranks_run_by_a_plan_with_unlike_numbers_of_stages() -> None:
    made = plan()
    for ran in run_ranks(trained, 2, made):
        assert ran["schedule"] == "searched" and ran["starts"] == list(made.split)
        for real, expected in zip(ran["peaks"], made.peaks, strict=True):
            assert 0.995 * real <= expected <= 1.2 * real  # as in test_searched_order.py
