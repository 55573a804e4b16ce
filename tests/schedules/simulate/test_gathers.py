"""Gathers and reductions of sharded stages in the simulator: a line of their own beside the computations of each rank."""

from __future__ import annotations

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

STAGE = StageCosts(forward=1, backward=2)


def ends(row: str, gathers: tuple[float, ...], reductions: tuple[float, ...]) -> dict[str, float]:
    costs = Costs((STAGE,) * len(gathers or reductions), gathers=gathers, reductions=reductions)
    return {str(event.action): event.end for event in simulate(Schedule.of([row]), costs).events}


def test_a_computation_waits_for_its_stage_and_the_step_for_its_reduction() -> None:
    found = ends("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD", (3,), (4,))
    assert found == {"0UNSHARD": 3, "0F0": 4, "0B0": 6, "0REDUCE_GRAD": 10, "0RESHARD": 6}


def test_the_line_serves_one_after_the_other_while_the_rank_computes() -> None:
    found = ends("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD", (3, 3), (4, 4))
    assert (found["0F0"], found["1UNSHARD"], found["1F0"], found["1B0"]) == (4, 6, 7, 9)
    assert (found["1RESHARD"], found["0B0"], found["0RESHARD"]) == (13, 11, 17)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_free_line_changes_nothing(name: str, blocking: bool) -> None:
    plain = make_table(name, 4, 8, 8)
    table = add_send_recv(plain) if blocking else plain
    costs = Costs((STAGE,) * 8, (0.5,) * 7, (0.5,) * 7, blocking=blocking)
    free = Costs((STAGE,) * 8, (0.5,) * 7, (0.5,) * 7, blocking=blocking, gathers=(0.0,) * 8, reductions=(0.0,) * 8)
    placed = place_shards(table, 1)
    assert simulate(placed, free).makespan == simulate(table, costs).makespan == simulate(placed, costs).makespan


def test_a_slow_line_is_the_bound_of_the_step() -> None:
    placed = place_shards(make_table("Interleaved1F1B", 2, 4, 8), 1)
    line = simulate(placed, Costs((STAGE,) * 4, gathers=(1000.0,) * 4))
    gathers = [sum(event.action.kind.value == "UNSHARD" for event in line.on(rank)) for rank in range(2)]
    assert max(gathers) * 1000 <= line.makespan <= sum(gathers) * 1000 + 4 * 8 * 3
    for rank in range(2):
        starts = [event.start for event in line.on(rank)]
        assert starts == sorted(starts)


def test_times_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ScheduleError, match="gathers has the times of 1 stages, and there are 2"):
        Costs((STAGE,) * 2, gathers=(1.0,))
    with pytest.raises(ScheduleError, match=r"reductions.* finite numbers"):
        Costs((STAGE,), reductions=(-1.0,))
