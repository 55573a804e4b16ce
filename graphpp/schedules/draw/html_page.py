"""Timelines as one HTML page: the chart inline, and the same numbers as a table.

Contract: the page is ASCII and needs no network and no script. A box shows its action, start, end and duration when the
pointer rests on it; a chart wider than the window scrolls by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from graphpp.schedules.draw.svg import draw_svg
from graphpp.schedules.draw.svg_elements import printable
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.units import spell_bytes, spell_time

_STYLE = """
body { font-family: system-ui, -apple-system, 'Segoe UI', Arial, sans-serif; color: #24292f; margin: 24px; }
h1 { font-size: 18px; }
h2 { font-size: 14px; margin: 24px 0 6px; }
.chart { overflow-x: auto; border: 1px solid #d0d7de; border-radius: 6px; }
.chart svg { display: block; }
.chart rect[class]:hover { stroke: #000000; stroke-width: 1.5; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #d0d7de; }
"""


def html_page(timelines: Sequence[Timeline], width: float | None = None) -> str:
    """The page as text; arguments and errors are those of `graphpp.schedules.draw.svg.draw_svg`."""
    chart = draw_svg(timelines, width)
    name = _safe(", ".join(dict.fromkeys(timeline.schedule.name for timeline in timelines)))
    tables = "".join(map(_table, timelines))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        f'<div class="chart">{chart}</div>\n{tables}</body>\n</html>\n'
    )


def _table(timeline: Timeline) -> str:
    """The numbers of each rank: computing time, idle share, peak bytes."""
    head = "".join(f"<th>{text}</th>" for text in ("rank", "computes", "idle", "most bytes alive"))
    rows = "".join(_row(timeline, rank) for rank in range(timeline.schedule.ranks))
    title = f"{timeline.name}: {spell_time(timeline.makespan, timeline.unit)}"
    return f"<h2>{_safe(title)}</h2>\n<table><tr>{head}</tr>{rows}</table>\n"


def _row(timeline: Timeline, rank: int) -> str:
    followed = spell_bytes(timeline.peak_bytes(rank)) if timeline.memory else "not followed"
    cells = (str(rank), spell_time(timeline.busy(rank), timeline.unit), f"{timeline.bubble(rank):.1%}", followed)
    return f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>"


def _safe(text: str) -> str:
    return escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode("ascii")
