"""The chart as data: every computation once, no rectangle over another, idle time in all the gaps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.schedules.draw.chart import STRIP, Chart, Rect
from graphpp.schedules.simulate.timeline import Event, Timeline, stages_of_ranks
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.tables import named, tables
from tests.schedules.timelines import placed

OVERLAPS = Schedule.of(
    ["0F0 0F1 1F0 (1F1;1B0)OVERLAP_F_B 0I0 1B1 0W0 0B1"], name="overlaps"
)  # one rank, two stages; the first stage's I and W separate


def on_rank(rects: tuple[Rect, ...], rank: int) -> list[Rect]:
    return sorted((rect for rect in rects if rect.rank == rank), key=lambda rect: (rect.start, rect.end))


def check_fills(timeline: Timeline) -> None:
    """Computations and idle time fill each row exactly."""
    chart = Chart.of(timeline)
    for rank in range(timeline.schedule.ranks):
        whole = {(rect.start, rect.end) for rect in on_rank(chart.computations, rank)}  # an overlap's parts are one
        spans = sorted([*whole, *((rect.start, rect.end) for rect in on_rank(chart.idle, rank))])
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert not timeline.events or (spans[0][0], spans[-1][1]) == (0.0, timeline.makespan)


@given(named())
def test_every_computation_is_drawn_once_and_idle_fills_the_rest(schedule: Schedule) -> None:
    timeline = placed(schedule)
    drawn = Counter(rect.part for rect in Chart.of(timeline).computations)
    assert drawn == Counter(leaf for _, _, action in schedule.cells() for leaf in action.leaves)
    check_fills(timeline)


@given(tables(), st.randoms(use_true_random=False))
def test_uneven_times(table: tuple, random) -> None:  # type: ignore[no-untyped-def,type-arg]
    rows, stages, microbatches, _ = table
    costs: dict[Action, float] = {}
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    timeline = placed(schedule, lambda action: costs.setdefault(action, random.randrange(1, 9)))
    check_fills(timeline)
    widths = {rect.event.action: rect.end - rect.start for rect in Chart.of(timeline).computations if rect.event}
    assert widths == costs


def test_the_parts_of_an_overlap_share_its_box() -> None:
    timeline = placed(OVERLAPS)
    check_fills(timeline)
    upper, lower = (rect for rect in Chart.of(timeline).computations if rect.event and rect.event.action.parts)
    assert (upper.part, lower.part) == (Action(1, Kind.F, 1), Action(1, Kind.B, 0))
    assert (upper.start, upper.end) == (lower.start, lower.end)
    assert (upper.top, upper.bottom, lower.top, lower.bottom) == (0.0, 0.5, 0.5, 1.0)


def test_messages_are_a_strip_and_leave_the_time_idle() -> None:
    schedule = Schedule.of(["0F0 0SEND_F0", "1RECV_F0 1F0"])
    events = (
        Event(0, Action(0, Kind.F, 0), 0.0, 2.0),
        Event(0, Action(0, Kind.SEND_F, 0), 2.0, 2.0),  # took no time of its rank
        Event(1, Action(1, Kind.RECV_F, 0), 0.5, 3.0),
        Event(1, Action(1, Kind.F, 0), 3.0, 5.0),
    )
    chart = Chart.of(Timeline(schedule, events))
    (strip,) = chart.messages
    assert (strip.rank, strip.start, strip.end, strip.top, strip.bottom) == (1, 0.5, 3.0, STRIP, 1.0)
    assert [(rect.rank, rect.start, rect.end) for rect in chart.idle] == [(0, 2.0, 5.0), (1, 0.0, 3.0)]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 4), (3, 9)])
def test_stages_of_a_rank_are_told_apart(ranks: int, stages: int) -> None:
    rows = [[f"{stage}F0" for stage in range(rank, stages, ranks)] for rank in range(ranks)]
    schedule = Schedule.of(rows)
    assert stages_of_ranks(schedule) == tuple(tuple(range(rank, stages, ranks)) for rank in range(ranks))
    chunks = {rect.part.stage: rect.chunk for rect in Chart.of(placed(schedule)).computations if rect.part}
    assert chunks == {stage: stage // ranks for stage in range(stages)}
