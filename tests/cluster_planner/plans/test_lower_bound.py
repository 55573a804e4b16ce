"""The lower bound of a plan: no simulated table of any cut is faster, and it is as high as a rank without waits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpp import Costs, StageCosts
from graphpp.cluster_planner.plans.prediction.lower_bound import least_seconds
from graphpp.errors import ScheduleError
from graphpp.planner.segments import Segments
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.cluster_planner.plans.test_plan import plans
from tests.exhaustive import examples
from tests.schedules.table.test_costs import mixed

SEGMENTS = 9


def tables(ranks: int, costs: Costs, microbatches: int) -> list[Schedule]:
    """Named tables for these stages, and a searched one."""
    found = [schedule_auto(costs, ranks=ranks, microbatches=microbatches, effort=0.02)]
    for generator in SCHEDULES.values():
        try:
            table = generator(ranks, len(costs.stages), microbatches)
        except ScheduleError:
            continue
        found += [table] if table.kinds & set(BACKWARDS) else []
    return found


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(3, 8), st.integers(0, 10**6))
def test_no_table_of_any_cut_is_faster(ranks: int, per_rank: int, microbatches: int, seed: int) -> None:
    random = Random(seed)
    segments = Segments(tuple(range(SEGMENTS)), replace(mixed(random, SEGMENTS), overlap=random.choice((0.8, 1.0))))
    bound = least_seconds(segments.costs, ranks, microbatches)
    for _ in range(3):
        cut = (0, *sorted(random.sample(range(1, SEGMENTS), ranks * per_rank - 1)))
        costs, _ = segments.stages(cut)
        for table in tables(ranks, costs, microbatches):
            assert bound <= simulate(table, costs).makespan * (1 + 1e-9), (table.name, cut)


def test_it_is_reached_by_ranks_that_never_wait() -> None:
    part = StageCosts(1, 1, 1)
    assert least_seconds(Costs((part, part)), 1, 4) == 24, "all work"
    assert least_seconds(Costs((part, part)), 2, 4) == 12, "half of the work"
    assert least_seconds(Costs((part, StageCosts(3, 3, 3))), 2, 4) == 36, "the heaviest segment"
    assert least_seconds(Costs((part, part), (5.0,), (6.0,)), 2, 1) == 4 + 11, "the path of a microbatch"
    assert least_seconds(Costs((part, part), (5.0,), (6.0,)), 1, 1) == 6, "without messages on one rank"
    mixture = StageCosts(4, backward=8, exchanged={Kind.F: 1, Kind.B: 2})
    assert least_seconds(Costs((mixture,), hidden=1.0), 1, 10) == 10 * 5, "I and W, and the exchange of F hides"
    sent = replace(mixture, input_grad=8.0, weight_grad=8.0)
    assert least_seconds(Costs((sent,), hidden=1.0), 1, 10) == 10 * (12 - 3), "all exchanges hide"
    assert least_seconds(Costs((sent,), hidden=0.0), 1, 10) == 10 * 12
    alone = StageCosts(4, 8, 8, backward=6, exchanged={Kind.B: 2}, overlapped={Kind.B: 2})
    assert least_seconds(Costs((alone,), hidden=0.0), 1, 10) == 10 * (4 + 6), "all exchanges hide without pairs"


@pytest.mark.parametrize("options", [{}, {"pp": 2, "recompute": ["full"]}, {"machines": "4xCPU", "param_dtype": None}])
def test_no_plan_is_below_its_bound(options: dict[str, object]) -> None:
    for each in plans(**options):
        assert 0 < each.bound <= each.step_seconds
        assert f"{each.over_bound} over the lower bound" in str(each)
