"""The seconds of a table that is read once are those of the simulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.step_time import StepTimes
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

TABLES = (
    ("1F1B", 1, None), ("ZB1P", 1, None), ("ZB2P", 1, None), ("ZBVZeroBubble", 2, 1), ("DualPipeV", 2, None),
    ("V-Half", 2, None), ("Interleaved1F1B", 2, 1), ("Interleaved1F1B", 4, 2), ("LoopedBFS", 2, 1),
    ("InterleavedZeroBubble", 2, None),
)  # fmt: skip


def uneven(stages: int, seed: int = 0) -> Costs:
    """Costs that differ by stage, with messages, gathers and reductions."""
    random = Random(seed)

    def some(count: int) -> tuple[float, ...]:
        return tuple(random.random() for _ in range(count))

    each = tuple(StageCosts(*some(3), backward=random.random() + 0.5, saved_bytes=random.randrange(9)) for _ in range(stages))
    return Costs(each, some(stages - 1), some(stages - 1), 0.8, gathers=some(stages), reductions=some(stages))


def running(name: str, per_rank: int, keep: int | None, ranks: int = 4, microbatches: int = 12) -> Schedule:
    return place_shards(add_send_recv(SCHEDULES[name](ranks, ranks * per_rank, microbatches)), keep)


@pytest.mark.parametrize(("name", "per_rank", "keep"), TABLES)
def test_the_span_is_that_of_the_simulator(name: str, per_rank: int, keep: int | None) -> None:
    table = running(name, per_rank, keep)
    times = StepTimes(table)
    for seed in range(3):
        costs = uneven(table.stages, seed)
        for collectives in (True, False):
            asked = costs if collectives else replace(costs, gathers=(), reductions=())
            timeline, found = simulate(table, asked), times.seconds(costs, collectives=collectives)
            assert found.makespan == pytest.approx(timeline.makespan, rel=1e-12)
            assert found.busy == pytest.approx([timeline.busy(rank) for rank in range(table.ranks)], rel=1e-12)


def test_a_table_without_messages_has_the_same_span() -> None:
    table, costs = SCHEDULES["ZBVZeroBubble"](3, 6, 7), uneven(6)
    assert StepTimes(table).seconds(costs).makespan == pytest.approx(simulate(table, costs).makespan, rel=1e-12)


def test_costs_that_it_does_not_cover_are_refused() -> None:
    times = StepTimes(running("1F1B", 1, None))
    with pytest.raises(ScheduleError, match="the costs are for 3 stages, but '1F1B' has 4"):
        times.seconds(uneven(3))
    for other in ({"blocking": True}, {"overhead": 1.0}):
        with pytest.raises(ScheduleError, match=r"graphpp\.simulate has blocking messages and overhead"):
            times.seconds(replace(uneven(4), **other))  # type: ignore[arg-type]


def test_a_table_that_waits_forever_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no rank can go on"):
        StepTimes(Schedule.of(["0B0 0F0", "1F0 1B0"]))
