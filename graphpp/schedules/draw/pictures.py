"""The pictures for users: a chart of schedules and timelines as SVG, and a Chrome trace. `graphpp.html` is in `report/`.

Contract: each function takes any number of `Schedule`s and `Timeline`s and draws them one above the other on one time axis,
in the order given. A `Schedule` is simulated first: with `costs`, else with F = I = W = 1 for each rank and microbatch.
"""

from __future__ import annotations

from graphpp.arguments import NUMBER, Accepted, checked, or_none
from graphpp.errors import ScheduleError
from graphpp.schedules.draw import chrome_trace as traces
from graphpp.schedules.draw.svg import draw_svg
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

_WIDTH = Accepted("pixels, above 0 and up to 100,000", lambda value: NUMBER.accepts(value) and 0 < value <= 1e5)  # type: ignore[operator]


@checked(ScheduleError, costs=or_none(COSTS), width=or_none(_WIDTH))
def svg(*drawn: Schedule | Timeline, costs: Costs | None = None, width: float | None = None) -> str:
    """The pipeline chart as a standalone SVG; `width` in pixels, None: as wide as the microbatch numbers need.

    Raises `ScheduleError` for a table that cannot run, `GraphPPError` without a timeline or with different units of time.
    """
    return draw_svg(timelines_of(drawn, costs), width)


@checked(ScheduleError, costs=or_none(COSTS))
def chrome_trace(*drawn: Schedule | Timeline, costs: Costs | None = None) -> str:
    """The events as JSON for chrome://tracing and Perfetto, a process per rank; arguments and errors as for `svg`."""
    return traces.trace_json(timelines_of(drawn, costs))
