"""The pipeline chart as one standalone SVG: ranks down, time across, several timelines one above the other on one axis.

A `Schedule` is simulated first: with `costs`, else with F = I = W = 1 for each rank and microbatch. Each timeline has a title,
a row per rank with the microbatch numbers that fit, and its memory curves below, all on one scale. A box shows its action and
times on hover. For many thousand actions `graphpp.html` makes the smaller file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, quantiles

from graphpp.arguments import NUMBER, Accepted, checked, or_none
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.schedules.draw.svg_elements import (
    COLLECTIVE,
    FAINT,
    IDLE,
    INK,
    RECEIVE,
    SEND,
    Scale,
    SvgWriter,
    ink_on,
    legend_text,
    message_colour,
    shade,
    text_width,
)
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Event, Timeline, stages_of_ranks
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import scale_of, spell_bytes, spell_time, ticks

_MARGIN, _LEFT, _RIGHT = 12.0, 104.0, 104.0
_ROW, _STRIP, _GAP, _LINE = 26.0, 22.0, 3.0, 22.0
_NARROWEST, _WIDEST, _BOX = 640.0, 2400.0, 20.0  # pixels: the limits of the plot's width, and the width of a usual box
_SMALLEST = 7.0  # pixels: the smallest readable size of a number
_PER_TICK = 80.0


_WIDTH = Accepted("pixels, above 0 and up to 100,000", lambda value: NUMBER.accepts(value) and 0 < value <= 1e5)  # type: ignore[operator]


@checked(ScheduleError, costs=or_none(COSTS), width=or_none(_WIDTH))
def svg(*drawn: Schedule | Timeline, costs: Costs | None = None, width: float | None = None) -> str:
    """The pipeline chart as a standalone SVG; `width` in pixels, None: as wide as the microbatch numbers need.

    Raises `ScheduleError` for a table that cannot run, `GraphPPError` without a timeline or with different units of time.
    """
    timelines = timelines_of(drawn, costs)
    unit = _common_unit(timelines)
    span = max(timeline.makespan for timeline in timelines)
    plot = _usual_width(timelines, span) if width is None else max(width - _LEFT - _RIGHT, 40.0)
    layout = _ChartLayout(SvgWriter(), Scale(_LEFT, plot, span), unit, _MARGIN)
    layout.legend(timelines)
    grid = layout.y
    most = max((count for each in timelines for row in each.memory for _, count in row), default=0)
    for timeline in timelines:
        layout.title(timeline)
        layout.rows(timeline)
        if timeline.memory:
            layout.memory(timeline, most)
    layout.axis(grid)
    return layout.writer.finish(_LEFT + plot + _RIGHT, layout.y + _MARGIN)


def _common_unit(timelines: Sequence[Timeline]) -> str:
    units = list(dict.fromkeys(timeline.unit for timeline in timelines))
    if len(units) != 1:
        found = " and ".join(map(repr, units)) or "no timeline"
        raise GraphPPError(f"a picture needs timelines in one unit of time, got {found}; simulate with measured costs")
    return units[0]


def _usual_width(timelines: Sequence[Timeline], span: float) -> float:
    """A plot width at which three of four boxes can hold a number, within limits."""
    lengths = [event.duration for event in _events(timelines) if event.action.is_compute and event.duration > 0]
    if len(lengths) < 2:
        return _NARROWEST
    return min(max(span / quantiles(lengths)[0] * _BOX, _NARROWEST), _WIDEST)


@dataclass
class _ChartLayout:
    """Writes the picture from top to bottom; `y` is the top of the next element."""

    writer: SvgWriter
    scale: Scale
    unit: str
    y: float

    def legend(self, timelines: Sequence[Timeline]) -> None:
        x, end = _MARGIN, self.scale.left + self.scale.width + _RIGHT - _MARGIN
        for fills, text in _legend(timelines):
            width = 16.0 * len(fills) + 4 + text_width(text, 11) + 14
            if x > _MARGIN and x + width > end:
                x, self.y = _MARGIN, self.y + 20
            for place, fill in enumerate(fills):
                self.writer.rect((x + 16 * place, self.y, 16.0, 12.0), fill, class_="legend")
            self.writer.text(x + 16 * len(fills) + 4, self.y + 6, text)
            x += width
        self.y += 24

    def title(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        counts = f"{schedule.stages} stages on {schedule.ranks} ranks, {schedule.microbatches} microbatches"
        idle = f", {mean(map(timeline.bubble, range(schedule.ranks))):.1%} idle" if schedule.ranks else ""
        text = f"{schedule.name}, {timeline.name}"
        facts = f"{counts}; {spell_time(timeline.makespan, self.unit)}{idle}"
        self.writer.text(_MARGIN, self.y + 8, text, 13, font_weight="bold")
        right = _MARGIN + text_width(text, 15) + 16  # bold runs wider
        below = right + text_width(facts, 11) > self.scale.left + self.scale.width + _RIGHT
        self.y += 16 if below else 0
        self.writer.text(_MARGIN if below else right, self.y + 8, facts, fill=FAINT)
        self.y += _LINE

    def rows(self, timeline: Timeline) -> None:
        """A row for each rank: idle time, computations over it, and messages over both at the foot of the row."""
        homes = stages_of_ranks(timeline.schedule)
        for rank, stages in enumerate(homes):
            y = self.y + rank * (_ROW + _GAP)
            several = len(stages) > 1
            self.writer.text(_MARGIN, y + _ROW * (0.3 if several else 0.5), f"rank {rank}")
            if several:
                self.writer.text(_MARGIN, y + _ROW * 0.76, _shortened(stages), 9, FAINT)
            self.writer.text(self.scale.x(self.scale.span) + 8, y + _ROW / 2, f"{timeline.bubble(rank):.1%} idle", fill=FAINT)
            self.writer.rect((self.scale.x(0), y, self.scale.length(timeline.makespan), _ROW), IDLE, class_="idle")
        for event in sorted(timeline.events, key=lambda event: not event.action.is_compute):
            self._box(event, homes[event.rank])
        self.y += len(homes) * (_ROW + _GAP) + 6

    def _box(self, event: Event, stages: Sequence[int]) -> None:
        y, title = self.y + event.rank * (_ROW + _GAP), self._said(event)
        x, width = self.scale.x(event.start), self.scale.length(event.duration)
        if event.action.is_compute:
            height = _ROW / len(event.action.leaves)
            for place, leaf in enumerate(event.action.leaves):
                box, fill = (x, y + place * height, width, height), shade(leaf.kind, stages.index(leaf.stage), len(stages))
                self.writer.rect(box, fill, title, class_=leaf.kind.value, stroke="#ffffff", stroke_width=0.6)
                self._number(box, str(leaf.microbatch), fill)
        elif event.duration > 0:
            self.writer.rect((x, y + 0.8 * _ROW, width, 0.2 * _ROW), message_colour(event.action), title, class_="message")

    def _number(self, box: tuple[float, float, float, float], text: str, fill: str) -> None:
        x, y, width, height = box
        size = min(11.0, height - 2, (width - 2) / (0.58 * len(text)))
        if size >= _SMALLEST:
            self.writer.text(x + width / 2, y + height / 2, text, size, ink_on(fill), text_anchor="middle")

    def _said(self, event: Event) -> str:
        times = [spell_time(time, self.unit) for time in (event.start, event.end, event.duration)]
        return "{} on rank {}\nstart {}\nend {}\nduration {}".format(event.action, event.rank, *times)

    def memory(self, timeline: Timeline, most: int) -> None:
        for rank, points in enumerate(timeline.memory):
            base = self.y + rank * (_STRIP + _GAP) + _STRIP
            peak = spell_bytes(timeline.peak_bytes(rank))
            self.writer.text(_MARGIN, base - _STRIP / 2, f"rank {rank}")
            self.writer.text(self.scale.x(self.scale.span) + 8, base - _STRIP / 2, f"{peak} peak", fill=FAINT)
            self.writer.add("path", d=self._steps(points, timeline.makespan, base, most), fill="#b9c7d6", class_="memory")
            left, right = self.scale.x(0), self.scale.x(timeline.makespan)
            self.writer.add("line", x1=left, x2=right, y1=base, y2=base, stroke=FAINT, stroke_width=0.6)
        self.y += len(timeline.memory) * (_STRIP + _GAP) + 8

    def _steps(self, points: Sequence[tuple[float, int]], end: float, base: float, most: int) -> str:
        path = [f"M{self.scale.x(points[0][0] if points else 0):.2f} {base:.2f}"]
        for time, count in points:
            path.append(f"H{self.scale.x(time):.2f}V{base - (_STRIP * count / most if most else 0):.2f}")
        return "".join([*path, f"H{self.scale.x(end):.2f}V{base:.2f}Z"])

    def axis(self, top: float) -> None:
        """The times below the last row, with faint lines up to `top`."""
        factor, name = scale_of(self.scale.span, self.unit)
        left, right = self.scale.x(0), self.scale.x(self.scale.span)
        for tick in ticks(self.scale.span * factor, int(self.scale.width / _PER_TICK)):
            x = self.scale.x(tick / factor)
            self.writer.add("line", x1=x, x2=x, y1=top + 18, y2=self.y + 4, stroke=INK, stroke_width=0.5, stroke_opacity=0.14)
            self.writer.text(x, self.y + 12, f"{tick:.6g}", 10, text_anchor="middle")
        self.writer.add("line", x1=left, x2=right, y1=self.y, y2=self.y, stroke=INK, stroke_width=1)
        self.writer.text(_MARGIN, self.y + 12, f"time in {name}", 10)
        self.y += 20


def _events(timelines: Sequence[Timeline]) -> list[Event]:
    return [event for timeline in timelines for event in timeline.events]


def _legend(timelines: Sequence[Timeline]) -> Iterator[tuple[list[str], str]]:
    """(colours, text) of each legend entry."""
    events = _events(timelines)
    kinds = {leaf.kind for event in events if event.action.is_compute for leaf in event.action.leaves}
    chunks = max((len(stages) for each in timelines for stages in stages_of_ranks(each.schedule)), default=0)
    drawn = [kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R) if kind in kinds]
    yield from (([shade(kind, 0, 1)], legend_text(kind)) for kind in drawn)
    if chunks > 1 and drawn:
        yield [shade(drawn[0], chunk, chunks) for chunk in range(chunks)], "first to last stage of a rank"
    messages = {message_colour(event.action) for event in events if not event.action.is_compute and event.duration > 0}
    texts = {SEND: "waits to send", RECEIVE: "waits to receive", COLLECTIVE: "collective"}
    yield from (([colour], text) for colour, text in texts.items() if colour in messages)
    if any(each.bubble(rank) > 1e-9 for each in timelines for rank in range(each.schedule.ranks)):
        yield [IDLE], "idle"
    if any(each.memory for each in timelines):
        yield ["#b9c7d6"], "bytes alive"


def _shortened(stages: Sequence[int]) -> str:
    text = f"stages {', '.join(map(str, stages))}"
    return text if len(text) <= 18 else f"stages {stages[0]}, {stages[1]} .. {stages[-1]}"
