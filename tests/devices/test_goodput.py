"""The share of the time that makes progress on GPUs that fail: against a simulation, and against every interval."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import graphpp
from graphpp.devices import Goodput
from graphpp.errors import ScheduleError
from tests.cluster_planner.plans.test_plan import plans

LARGE = Goodput(step_seconds=10.0, gpus=16_384, mtbf_hours=50_000, save_seconds=60, restart_seconds=900)
FRAGILE = Goodput(step_seconds=7.0, gpus=4_096, mtbf_hours=4_000, save_seconds=120, restart_seconds=600)


def simulated(given: Goodput, saves: int) -> float:
    """The share of the time that makes progress, in a simulated training of so many saves."""
    draw, work = random.Random(1), given.steps * given.step_seconds
    clock, failure = 0.0, draw.expovariate(1 / given.failure_seconds)
    for _ in range(saves):
        needed = work + given.save_seconds
        while clock + needed > failure:  # the interval, or a restart before it, fails
            clock, needed = failure, given.restart_seconds + work + given.save_seconds
            failure = clock + draw.expovariate(1 / given.failure_seconds)
            while clock + given.restart_seconds > failure:
                clock, failure = failure, failure + draw.expovariate(1 / given.failure_seconds)
        clock += needed
    return saves * work / clock


@pytest.mark.parametrize("given", [LARGE, FRAGILE, replace(FRAGILE, mtbf_hours=1_000)])
def test_the_share_is_that_of_a_simulated_training(given: Goodput) -> None:
    assert given.share == pytest.approx(simulated(given, 100_000), rel=0.01)


def with_steps(given: Goodput, steps: int) -> float:
    """The share with a save every so many steps."""

    class Fixed(Goodput):
        steps = 0

    Fixed.steps = steps
    return Fixed(given.step_seconds, given.gpus, given.mtbf_hours, given.save_seconds, given.restart_seconds).share


@pytest.mark.parametrize("given", [LARGE, FRAGILE, replace(LARGE, save_seconds=1.0)])
def test_no_other_interval_is_better(given: Goodput) -> None:
    best = max(with_steps(given, steps) for steps in range(1, 2 * given.steps))
    assert given.share == pytest.approx(with_steps(given, given.steps))
    assert given.share > best - 2e-4


def test_known_shares() -> None:
    assert LARGE.failure_seconds / 3600 == pytest.approx(3.05, rel=0.01)
    assert "a save every 11" in str(LARGE) and "a failure every 3.1 hours" in str(LARGE)
    assert 0.8 < LARGE.share < 0.95
    assert replace(LARGE, gpus=8).share > 0.997 > replace(LARGE, gpus=1024).share > LARGE.share
    assert replace(LARGE, save_seconds=0).steps == 1
    assert replace(LARGE, mtbf_hours=0.001).share == 0.0, "no overflow where nothing ends before the next failure"


def test_a_plan_has_the_goodput_of_its_step_and_gpus() -> None:
    best = plans().best
    own = best.goodput(mtbf_hours=50_000, save_seconds=30, restart_seconds=600)
    assert (own.step_seconds, own.gpus) == (best.step_seconds, 8) and own.share > 0.99
    assert isinstance(own, graphpp.devices.Goodput)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"gpus": 0}, "gpus"), ({"mtbf_hours": 0}, "mtbf_hours"), ({"save_seconds": -1.0}, "save_seconds"),
     ({"step_seconds": "1"}, "step_seconds"), ({"restart_seconds": float("nan")}, "restart_seconds")],
)  # fmt: skip
def test_refused_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ScheduleError, match=named):
        replace(LARGE, **changes)
