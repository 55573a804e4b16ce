"""The pictures for users: a chart of schedules and timelines as SVG, as an HTML page, as a Chrome trace.

Contract: each function takes any number of `Schedule`s and `Timeline`s and draws them one above the other on one time axis,
in the order given. A `Schedule` is simulated first: with `costs`, else with F = I = W = 1 for each rank and microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpp.arguments import NUMBER, Accepted, checked, one_of, or_none, require
from graphpp.errors import ScheduleError
from graphpp.schedules.draw import chrome_trace as traces
from graphpp.schedules.draw.html_page import html_page
from graphpp.schedules.draw.svg import draw_svg
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

Drawable = Schedule | Timeline

_DRAWABLE = one_of(Schedule, Timeline, takes="a graphpp.Schedule or a graphpp.Timeline")
_WIDTH = Accepted("pixels, above 0 and up to 100,000", lambda value: NUMBER.accepts(value) and 0 < value <= 1e5)  # type: ignore[operator]


@checked(ScheduleError, costs=or_none(COSTS), width=or_none(_WIDTH))
def svg(*drawn: Drawable, costs: Costs | None = None, width: float | None = None) -> str:
    """The pipeline chart as a standalone SVG; `width` in pixels, None: as wide as the microbatch numbers need.

    Raises `ScheduleError` for a table that cannot run, `GraphPPError` without a timeline or with different units of time.
    """
    return draw_svg(_timelines(drawn, costs), width)


@checked(ScheduleError, costs=or_none(COSTS), width=or_none(_WIDTH))
def html(*drawn: Drawable, costs: Costs | None = None, width: float | None = None) -> str:
    """The chart as an HTML page of its own, with a table of each rank's numbers; arguments and errors as for `svg`."""
    return html_page(_timelines(drawn, costs), width)


@checked(ScheduleError, costs=or_none(COSTS))
def chrome_trace(*drawn: Drawable, costs: Costs | None = None) -> str:
    """The events as JSON for chrome://tracing and Perfetto, a process per rank; arguments and errors as for `svg`."""
    return traces.trace_json(_timelines(drawn, costs))


def _timelines(drawn: Sequence[Drawable], costs: Costs | None) -> list[Timeline]:
    for each in drawn:
        require(ScheduleError, "drawn", _DRAWABLE, each)
    return [each if isinstance(each, Timeline) else _simulated(each, costs) for each in drawn]


def _simulated(schedule: Schedule, costs: Costs | None) -> Timeline:
    if costs is not None:
        return simulate(schedule, costs)
    unit = Costs.unit(schedule.stages, schedule.ranks) if schedule.stages else Costs(())
    return replace(simulate(schedule, unit), unit="units")
