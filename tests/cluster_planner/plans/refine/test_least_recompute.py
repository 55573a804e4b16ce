"""Recomputation by degree: as few layers as fit, more of them on the ranks that hold more microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphpp import TrainingPlan
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.prediction.single_layers import layer_names
from graphpp.cluster_planner.plans.refine.least_memory import least_recompute
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import Machines
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.planner.segments import Cut
from tests.cluster_planner.plans.test_plan import LENGTH, costs, plans, trained
from tests.distributed import run_ranks

SETTING = PlanSetting(MeshShape(pp=2), 4, 8, ScheduleChoice("1F1B"), None, "full")


def request_of() -> PlanRequest:
    return PlanRequest(costs(None, "cpu"), Machines.read("2xCPU"), 32, LENGTH, None)


def predicted(setting: PlanSetting, cut: Cut | None = None) -> Prediction:
    found = predict(request_of(), setting, cut)
    assert found is not None
    return found


def between(share: float) -> int:
    """A cap between the bytes of no recomputation and those of all layers."""
    none, every = (predicted(replace(SETTING, recompute=word)).peak for word in (None, "full"))
    return round(every + share * (none - every))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("word", ["selective", "full"])
def test_no_rank_recomputes_a_layer_more_than_its_memory_asks_for(word: str, share: float) -> None:
    setting, cap = replace(SETTING, recompute=word), between(share)
    if predicted(setting).peak > cap:
        assert least_recompute(request_of(), setting, cap) is None
        return
    found = least_recompute(request_of(), setting, cap)
    assert found is not None
    least, cut = found
    assert predicted(least, cut).peak <= cap and least.recomputed is not None
    assert predicted(least, cut).seconds.total < predicted(setting).seconds.total
    for stage, count in enumerate(least.recomputed):
        if count:
            fewer = replace(least, recomputed=tuple(each - (at == stage) for at, each in enumerate(least.recomputed)))
            assert predicted(fewer, cut).peaks[stage] > cap


def test_a_cap_above_all_asks_for_none_and_one_below_all_for_too_much() -> None:
    found = least_recompute(request_of(), SETTING, 2**40)
    assert found is not None and (found[0].recompute, found[0].recomputed) == (None, None)
    assert least_recompute(request_of(), SETTING, 1000) is None


def test_the_names_are_those_of_the_first_layers_of_each_stage() -> None:
    known = request_of().costs
    cut = (0, known.layers[3])
    assert layer_names(known, replace(SETTING, recomputed=(2, 1)), cut) == ("layers.0", "layers.1", "layers.3")
    assert layer_names(known, SETTING, cut) == ()


def test_numbers_of_layers_need_a_word_and_every_stage() -> None:
    for wrong in ({"recompute": None}, {"recompute": 0.5}, {"recomputed": (1,)}):
        with pytest.raises(ScheduleError, match="recomputed: give numbers of layers of 2 stages"):
            replace(SETTING, **{"recomputed": (1, 1), **wrong})  # type: ignore[arg-type]


def test_a_pipeline_that_runs_by_such_a_plan_holds_the_predicted_bytes() -> None:
    word = "full"  # "selective" saves no bytes of this model
    options = {"machines": "2xCPU", "pp": 2, "param_dtype": None, "schedules": ["1F1B"], "rows": 4, "batch": 32, "work": 20_000}
    whole = [plans(**options, memory_cap=2**33, recompute=[each]).best.peak for each in (None, word)]
    found = plans(**options, memory_cap=round(0.6 * whole[0] + 0.4 * whole[1]), recompute=[None, word])
    best = found.best
    assert best.setting.recomputed is not None and 0 < sum(best.setting.recomputed) < 8 and best.recomputed
    assert TrainingPlan.from_json(best.to_json()) == best
    assert "recomputed layers" in best.details and f"{word} of {sum(best.setting.recomputed)} layers" in str(found)
    for ran in run_ranks(trained, 2, best):
        assert ran["starts"] == list(best.split)
        for real, expected in zip(ran["peaks"], best.peaks, strict=True):
            assert 0.995 * real <= expected <= 1.06 * real  # as in test_plan.py


def test_a_plan_has_as_many_names_as_layers() -> None:
    best = plans(machines="2xCPU", pp=2, param_dtype=None, memory_cap=2**33).best
    with pytest.raises(GraphPPError, match=r"plan\.recomputed: take the names of 0 layers, got 1"):
        replace(best, recomputed=("layers.0",))
