"""Placed weight gradients: a plan may have a named schedule with them where it is faster, as data, and runs by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import graphpp
from graphpp import Schedule, TrainingPlan
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import predict
from graphpp.cluster_planner.plans.refine import better_orders, placed_stages
from graphpp.cluster_planner.plans.refine.better_orders import MOST_PLACED, placed_weight_grads
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice
from graphpp.schedules.table.actions import Kind
from tests.cluster_planner.plans.refine.test_searched_order import OPTIONS, SETTING, predicted, request_of
from tests.cluster_planner.plans.test_plan import LENGTH, VOCAB, Decoder, example, loss, plans
from tests.distributed import run_ranks
from tests.models import Batch
from tests.reference import eager_steps


def test_weight_gradients_are_placed_where_that_is_faster_and_fits() -> None:
    named = predicted(SETTING)
    free = placed_weight_grads(request_of(), named, 2**33)
    assert free is not None and placed_weight_grads(request_of(), named, 1000) is None
    for cap in (2**33, free.peak - 1):
        found = placed_weight_grads(request_of(), named, cap)
        assert found is not None and found.seconds.total < named.seconds.total and found.peak <= cap
        assert found == predict(request_of(), found.setting, named.cut) == placed_weight_grads(request_of(), named, cap)
        assert str(found.setting.schedule) == "1F1B, weight gradients placed"
        assert Kind.W in found.setting.schedule.table(2, 4).kinds
        assert replace(found.setting, schedule=SETTING.schedule) == SETTING
        assert placed_weight_grads(request_of(), found, cap) is None


@pytest.mark.parametrize(
    "setting",
    [
        replace(SETTING, microbatches=MOST_PLACED), replace(SETTING, offload=0.5),
        PlanSetting(MeshShape(), 4, 4, ScheduleChoice("auto")),
    ],
)  # fmt: skip
def test_long_steps_and_offload_and_single_ranks_stay_as_they_are(setting: PlanSetting) -> None:
    assert placed_weight_grads(request_of(), replace(predicted(SETTING), setting=setting), 2**33) is None


def batch(plan: TrainingPlan) -> Tensor:
    shape = plan.setting.rows * plan.setting.microbatches, LENGTH
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))


def stepped(rank: int, plan: TrainingPlan) -> tuple[str, dict[str, Tensor | None]]:
    """The text of the table that ran, and the gradients of a step by a plan."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe = graphpp.compile(Decoder(), loss, example=example(plan.setting.rows, "cpu"), plan=plan)
    tokens = batch(plan)
    pipe.step(tokens, target=tokens)
    return pipe.plan.schedule.name, {fqn: each.grad for fqn, each in pipe.named_parameters()}


def test_a_plan_with_placed_weight_gradients_has_eagers_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(better_orders, "MOST_SEARCHED", 4)
    monkeypatch.setattr(placed_stages, "MOST_PLACED", 4)
    options = {**OPTIONS, "schedules": ["1F1B", ORDER]}
    best = plans(**options).best
    assert str(best.setting.schedule) == "1F1B, weight gradients placed" and str(best.setting.schedule) in str(best.setting)
    assert best == plans(**options).best == TrainingPlan.from_json(best.to_json())
    assert best.table() == Schedule.parse(best.setting.schedule.order or "")
    torch.manual_seed(0)
    tokens = batch(best)
    eager = eager_steps(Decoder(), loss, [Batch((tokens,), {}, tokens)], best.setting.microbatches, 1, None).grads[0]
    ran = run_ranks(stepped, 2, best)
    found = {fqn: grad for _, grads in ran for fqn, grad in grads.items()}
    assert found.keys() == eager.keys() and {name for name, _ in ran} == {"1F1B, weight gradients placed"}
    for fqn, grad in found.items():
        assert grad is not None and torch.equal(grad, eager[fqn]), fqn
