"""Recomputation ahead of backwards: a plan that recomputes may have an order with R where it is faster, and runs by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphpp
from graphpp import Schedule, TrainingPlan
from graphpp.cluster_planner.plans.prediction.predict_step import predict
from graphpp.cluster_planner.plans.refine import placed_stages
from graphpp.cluster_planner.plans.refine.better_orders import placed_weight_grads, recomputed_ahead
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.schedules.table.actions import Kind
from tests.cluster_planner.plans.refine.test_placed_weight_grads import batch, stepped
from tests.cluster_planner.plans.refine.test_searched_order import OPTIONS, SETTING, predicted, request_of
from tests.cluster_planner.plans.test_plan import Decoder, loss, plans
from tests.distributed import run_ranks
from tests.models import Batch
from tests.reference import eager_steps
from tests.training import unequal

FULL = replace(SETTING, recompute="full")


@pytest.mark.parametrize("setting", [FULL, replace(FULL, recomputed=(1, 0))], ids=["all layers", "one layer"])
def test_recomputation_moves_where_that_is_faster_and_fits(setting: PlanSetting) -> None:
    named = predicted(setting)
    found = recomputed_ahead(request_of(), named, 2**33)
    assert found is not None and found.seconds.total < named.seconds.total
    assert found == predict(request_of(), found.setting, named.cut) == recomputed_ahead(request_of(), named, found.peak)
    assert str(found.setting.schedule) == "1F1B, recomputed ahead"
    assert found.setting.schedule.table(2, 4).recomputed_ahead <= {(0, microbatch) for microbatch in range(4)}
    assert replace(found.setting, schedule=SETTING.schedule) == setting
    assert recomputed_ahead(request_of(), found, 2**33) is None and recomputed_ahead(request_of(), named, 1000) is None


def test_recomputation_moves_behind_placed_weight_gradients_too() -> None:
    placed = placed_weight_grads(request_of(), predicted(FULL), 2**33)
    assert placed is not None
    found = recomputed_ahead(request_of(), placed, 2**33)
    assert found is None or (found.seconds.total < placed.seconds.total and found.setting.schedule.recomputes_ahead)


@pytest.mark.parametrize("setting", [SETTING, replace(FULL, keep=0), replace(FULL, offload=0.5)])
def test_other_settings_stay_as_they_are(setting: PlanSetting) -> None:
    assert recomputed_ahead(request_of(), replace(predicted(FULL), setting=setting), 2**33) is None


def test_the_plan_comes_back_from_json_and_has_eagers_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_stages, "MOST_PLACED", 4)  # so that 1F1B is among the fastest plans
    found = plans(**OPTIONS, schedules=["1F1B", "searched"], recompute=["full"])
    named = next(each for each in found if str(each.setting.schedule) == "1F1B")
    ahead = next(each for each in found if str(each.setting.schedule) == "1F1B, recomputed ahead")
    assert ahead.step_seconds < named.step_seconds
    assert TrainingPlan.from_json(ahead.to_json()) == ahead
    assert ahead.table() == Schedule.parse(ahead.setting.schedule.order or "") and Kind.R in ahead.table().kinds
    assert graphpp.simulate(ahead.table(), ahead.costs).makespan < graphpp.simulate(named.table(), ahead.costs).makespan
    torch.manual_seed(0)
    tokens = batch(ahead)
    eager = eager_steps(Decoder(), loss, [Batch((tokens,), {}, tokens)], ahead.setting.microbatches, 1, None).grads[0]
    ran = run_ranks(stepped, 2, ahead)
    assert {name for name, _ in ran} == {"1F1B, recomputed ahead"}
    assert unequal({fqn: grad for _, grads in ran for fqn, grad in grads.items()}, eager) == []
