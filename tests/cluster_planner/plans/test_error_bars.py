"""The error of a plan: by kind of training and device, and in the text of the plan."""

from __future__ import annotations

import pytest

from graphpp.cluster_planner.plans.prediction.error_bars import ERRORS, error_of, kind_of
from graphpp.devices import H100_SXM
from graphpp.units import spell_time
from tests.cluster_planner.plans.test_plan import plans


def test_each_kind_has_percentiles_around_one() -> None:
    assert ERRORS.keys() == {kind_of(experts, pipeline) for experts in (True, False) for pipeline in (True, False)}
    assert all(low < 1 < high for low, high in ERRORS.values())


@pytest.mark.parametrize(("name", "known"), [(H100_SXM.name, True), (H100_SXM.limited(500).name, True), ("CPU_CORE", False)])
def test_only_devices_of_published_runs_have_an_error(name: str, known: bool) -> None:
    assert error_of(name, experts=True, pipeline=True) == (ERRORS["experts"] if known else None)


def test_a_plan_says_its_error_and_what_its_hardware_does() -> None:
    best = plans(recompute=["full"], schedules=["1F1B"], pp=2, work=500).best
    assert best.error == ERRORS["pipeline"]
    low, high = (spell_time(best.step_seconds * each, "s") for each in best.error)
    assert f"({low} to {high} for 80 % of published runs like it)" in str(best)
    assert best.hfu > 1.1 * best.mfu and f"(hardware {best.hfu:.1%})" in str(best)
