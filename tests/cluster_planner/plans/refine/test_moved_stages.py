"""Moved stage starts: no cut of the same setting that fits is much faster, and the plan says so."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from graphpp import TrainingPlan
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.refine.moved_stages import moved_stages
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import Machines
from graphpp.planner.segments import Cut
from tests.cluster_planner.plans.test_plan import LENGTH, costs, plans
from tests.exhaustive import further

DENSE = PlanSetting(MeshShape(pp=2), 4, 4, ScheduleChoice("1F1B"))
WOVEN = PlanSetting(MeshShape(pp=2, tp=2), 4, 8, ScheduleChoice("DualPipeV", 2))
LONG = PlanSetting(MeshShape(pp=2), 1, 512, ScheduleChoice("Interleaved1F1B", 2))
SOME = PlanSetting(MeshShape(pp=2), 4, 4, ScheduleChoice("1F1B"), recompute="full", recomputed=(3, 1))
LAYERS = PlanSetting(MeshShape(pp=2, dp_shard=2), 4, 4, ScheduleChoice("1F1B"), 0)
MOST = 2**40


def request_of(setting: PlanSetting) -> PlanRequest:
    rows = setting.rows * setting.microbatches * setting.shape.data_ranks
    return PlanRequest(costs(torch.bfloat16, "cuda"), Machines.read(f"{setting.shape.ranks}xH100"), rows, LENGTH)


def all_cuts(setting: PlanSetting) -> list[Cut]:
    return [(0, *rest) for rest in combinations(range(1, len(request_of(setting).costs.starts)), setting.stages - 1)]


def predicted(setting: PlanSetting, cut: Cut | None = None) -> Prediction:
    found = predict(request_of(setting), setting, cut)
    assert found is not None
    return found


@pytest.mark.parametrize("setting", [DENSE, WOVEN, *further(LONG, LAYERS)], ids=str)
def test_no_other_cut_is_much_faster(setting: PlanSetting) -> None:
    each = [predicted(setting, cut) for cut in all_cuts(setting)]
    worst, best = (which(each, key=lambda one: one.seconds.total) for which in (max, min))
    found = moved_stages(request_of(setting), worst, MOST)
    assert found is not None and found.seconds.total <= 1.005 * best.seconds.total
    assert found.moved == 1 - found.seconds.total / worst.seconds.total > 0
    assert (found.seconds, found.peaks) == (predicted(setting, found.cut).seconds, predicted(setting, found.cut).peaks)
    cap = worst.peak  # that of the start, which the best cut may exceed
    within = [one for one in each if one.peak <= cap]
    capped = moved_stages(request_of(setting), worst, cap)
    assert capped is not None and capped.peak <= cap
    assert capped.seconds.total <= 1.02 * min(one.seconds.total for one in within)


def test_recomputed_layers_stay_in_their_stages() -> None:
    few = predicted(SOME, (0, 8))
    found = moved_stages(request_of(SOME), few, MOST)
    assert found is not None and found.seconds.total < few.seconds.total
    assert 4 < found.cut[1] <= 9, "three layers before it, and one behind"


def test_a_plan_names_what_its_moves_save(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"machines": "3xH100", "pp": 3, "schedules": ["ZBVZeroBubble"], "recompute": [None], "rows": 1, "batch": 12}
    moved = plans(**options)
    monkeypatch.setattr("graphpp.cluster_planner.plans.refine.fastest_plans._MOVED", 0)
    balanced = {each.setting: each for each in plans(**options)}
    gained = [each for each in moved if each.moved]
    assert gained
    for each in gained:
        before = balanced[each.setting]
        assert each.step_seconds == pytest.approx((1 - each.moved) * before.step_seconds) and each.split != before.split
        assert f"(moved: {each.moved:.1%} less than with balanced stages)" in str(each)
        assert TrainingPlan.from_json(each.to_json()) == each
    assert all(before.moved == 0 and "moved" not in str(before) for before in balanced.values())
