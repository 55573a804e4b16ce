"""A page as one HTML file with inline template, style, scripts, chart library and data.

Contract: the file loads nothing; its content security policy forbids it. All texts of the page's data are escaped. Headings,
facts and tables need no script; a script draws the charts. Equal pages give equal text.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from graphpp.arguments import checked, or_none
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.report import tables
from graphpp.report.chart_data import chart_data
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import Page
from graphpp.report.timeline_view import TimelineView
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes, spell_time

if TYPE_CHECKING:
    from jinja2 import Environment

_ASSETS = Path(__file__).parent / "assets"
_PARTS = ("base", "actions", "timeline", "memory", "bars", "plans", "plan_table", "plan_pair", "run", "main")
_SCRIPTS = ("echarts/echarts.min.js", *(f"{part}.js" for part in _PARTS))


@checked(ScheduleError, costs=or_none(COSTS))
def html(*drawn: Schedule | Timeline, costs: Costs | None = None) -> str:
    """A page with the timelines one above the other, on one axis if their units of time are equal; write it as UTF-8.

    A `Schedule` is simulated with `costs`, by default F = I = W = 1 per rank and microbatch. A single timeline's page also has
    its memory. Raises `ScheduleError` for a table that cannot run, `GraphPPError` for a timeline without events.
    """
    timelines = timelines_of(drawn, costs)
    names = dict.fromkeys(timeline.schedule.name for timeline in timelines)
    memory = None
    if len(timelines) == 1 and timelines[0].memory:
        moments = [[(time, {"alive": nbytes}) for time, nbytes in curve] for curve in timelines[0].memory]
        note = "Activations of microbatches, and messages between stages."
        memory = MemoryView.of(moments, unit=timelines[0].unit, note=note)
    return page_html(Page(", ".join(names), timelines=tuple(map(TimelineView.of, timelines)), memory=memory))


def page_html(page: Page) -> str:
    data, columns = chart_data(page)
    return _environment().get_template("page.html").render(
        page=page,
        data=data,
        columns=columns,
        styles=[_asset("page.css")],
        theme=_asset("theme.js"),
        scripts=[_asset(name) for name in _SCRIPTS],
        licences=[_asset(f"echarts/{name}") for name in ("NOTICE", "LICENSE-zrender", "LICENSE-d3")],
        tables=tables,
        spell_bytes=spell_bytes,
        spell_time=spell_time,
    )


def write_page(page: Page, path: Path) -> Path:
    """Write the page's file atomically, creating missing folders; return its path. Raises `GraphPPError` on failure."""
    text = page_html(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    except OSError as fault:
        reason = f"the page cannot be written to {path} ({fault.strerror})"
        raise GraphPPError(f"{reason}: give a folder that can be written") from fault
    return path


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # loaded by the first page

    return Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _asset(name: str) -> str:
    """A file of graphpp, not escaped: none contains the end tag of a script or a style."""
    return (_ASSETS / name).read_text(encoding="utf-8")
