"""`graphpp.html`: schedules and timelines as a report page.

Contract: a `Schedule` is simulated first, with `costs`, else with F = I = W = 1 for each rank and microbatch. The memory over
time stands on the page of a single timeline.
"""

from __future__ import annotations

from graphpp.arguments import checked, or_none
from graphpp.errors import ScheduleError
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import Page
from graphpp.report.page_html import page_html
from graphpp.report.timeline_view import TimelineView
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

_BYTES = "Activations of microbatches, and messages between stages."


@checked(ScheduleError, costs=or_none(COSTS))
def html(*drawn: Schedule | Timeline, costs: Costs | None = None) -> str:
    """A page with the timelines one above the other, on one axis where their units of time are equal; write it as UTF-8.

    Raises `ScheduleError` for a table that cannot run, `GraphPPError` for a timeline without events.
    """
    timelines = timelines_of(drawn, costs)
    names = dict.fromkeys(timeline.schedule.name for timeline in timelines)
    return page_html(Page(", ".join(names), timelines=tuple(map(TimelineView.of, timelines)), memory=_memory(timelines)))


def _memory(timelines: list[Timeline]) -> MemoryView | None:
    if len(timelines) != 1 or not timelines[0].memory:
        return None
    moments = [[(time, {"alive": nbytes}) for time, nbytes in curve] for curve in timelines[0].memory]
    return MemoryView.of(moments, unit=timelines[0].unit, note=_BYTES)
