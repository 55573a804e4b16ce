"""The best plan is the simplest one within 2 % of the fastest, and the plans say why."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from graphpp import TrainingPlans
from graphpp.cluster_planner.plans.found_plans import ranked, with_yours
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice, simplicity, unlike
from graphpp.cluster_planner.plans.training_plan import StepSeconds
from graphpp.schedules.table.costs import Costs
from tests.cluster_planner.plans.test_plan import plans

PLAIN = PlanSetting(MeshShape(pp=2, dp_shard=8), 1, 4, ScheduleChoice("1F1B"))
ORDERED = replace(PLAIN, schedule=ScheduleChoice(ORDER, order="0F0"))
IN_ORDER = [  # the simplest first
    PLAIN,
    replace(PLAIN, shape=MeshShape(pp=1, dp_replicate=2, dp_shard=8)),
    replace(PLAIN, shape=MeshShape(pp=1, dp_shard=16)),
    replace(PLAIN, logits_tokens=256),
    ORDERED,
    replace(PLAIN, recompute="selective"),
    replace(PLAIN, offload=0.125),
]
FACTS = {"machines": "measured", "split": (), "batch": 8, "tokens": 0, "mfu": 0.0, "dtype": None, "costs": Costs.unit(2)}


def predicted(setting: PlanSetting, seconds: float, peak: int = 100) -> Prediction:
    peaks = (peak,) * setting.shape.pp
    return Prediction(setting, (), StepSeconds(forward=seconds), peaks, {"activations": peak}, {})


def chosen(*given: tuple[PlanSetting, float], cap: float = float("inf")) -> TrainingPlans:
    return ranked([predicted(*each) for each in given], cap, len(given), lambda each: FACTS)


def test_the_order_of_simple_settings() -> None:
    keys = [simplicity(each) for each in IN_ORDER]
    assert keys == sorted(keys)
    assert unlike(IN_ORDER[0], IN_ORDER[2]) == "with 8 ranks in its largest collective, not 16"
    assert unlike(ORDERED, PLAIN) == "with an order of its own" and unlike(PLAIN, PLAIN) == ""


@pytest.mark.parametrize("other", IN_ORDER[2:])
def test_a_simpler_plan_within_2_percent_is_the_best(other: PlanSetting) -> None:
    found = chosen((other, 1.0), (PLAIN, 1.019))
    assert found.best.setting == PLAIN and found.plans[1].setting == other
    assert found.best.reason == f"best: slower by 1.9% than the fastest, but {unlike(PLAIN, other)}"
    assert found.plans[1].reason == f"the fastest, by 1.9%, but {unlike(other, PLAIN)}"
    assert "not the best" not in str(found) and found.best.reason in str(found.best)
    assert chosen((other, 1.0), (PLAIN, 1.021)).best.setting == other, "more than 2 % is too much"


def test_of_equally_simple_plans_the_fastest_is_the_best() -> None:
    away = replace(PLAIN, offload=0.5)
    found = chosen((away, 1.0), (replace(PLAIN, rows=2), 1.01), (PLAIN, 1.015), (ORDERED, 1.005), (PLAIN, 1.4))
    assert [each.seconds.total for each in found] == [1.01, 1.0, 1.005, 1.015, 1.4]
    reasons = [each.reason for each in found]
    assert reasons[2] == "faster by 0.5%, but with an order of its own" and reasons[3].startswith("slower by 0.5%: ")
    assert chosen((PLAIN, 1.0), (away, 1.01)).best.reason == "", "the best is the fastest"
    assert [each.reason for each in chosen((PLAIN, 1.0), (away, 1.0))] == ["", "as fast, but with offload"]


def test_a_simpler_plan_over_the_cap_is_not_the_best() -> None:
    large = predicted(PLAIN, 1.0, peak=200)
    found = ranked([predicted(replace(PLAIN, recompute="full"), 1.01), large], 150, 2, lambda each: FACTS)
    assert found.best.setting.recompute == "full" and found.best.reason == ""
    assert found.plans[1].reason == "50 B over the cap, most of it activations"


def test_the_reasons_are_in_json_the_page_and_the_front() -> None:
    found = plans(work=20_000)
    assert re.match(r"best: slower by .*% than the fastest, but without an order of its own", found.best.reason)
    fastest = min(found, key=lambda each: each.step_seconds)
    assert fastest.reason.startswith("the fastest, by ") and found.front[0] == fastest
    assert TrainingPlans.from_json(found.to_json()) == found
    page = found.to_html()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [each["reason"] for each in data["plans"]] == [each.reason for each in found]


def test_a_layout_of_ones_own_is_told_from_the_fastest() -> None:
    found = chosen((replace(PLAIN, offload=0.5), 1.0), (PLAIN, 1.01), cap=1_000)
    own = []
    for setting, seconds in ((ORDERED, 1.005), (replace(PLAIN, rows=2), 1.005), (ORDERED, 0.99)):
        yours = replace(found.best, setting=setting, seconds=StepSeconds(forward=seconds))
        own.append(with_yours(found, yours, (), 1_000).yours)
    reasons = [each.reason for each in own if each is not None]
    assert reasons[:2] == ["faster by 0.5%, but with an order of its own", "faster by 0.5%"]
    assert reasons[2] == "faster by 1.0% than what the search found"
