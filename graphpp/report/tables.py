"""The tables of a page as text: the numbers of each chart, readable without a script.

Contract: each function takes parts of a `Page` and returns `Table`s. Nothing is escaped here. A long table states how many rows
it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan

from graphpp.report.memory_view import MemoryView
from graphpp.report.page import BoundaryView, PlanEntry, RelayView, StageView, ValueView
from graphpp.report.run_view import Curve, RunView
from graphpp.report.timeline_view import TimelineView
from graphpp.units import spell_bytes, spell_time

_MOST_ROWS = 400


@dataclass(frozen=True)
class Column:
    """A column's head. Numbers are right-aligned, texts left-aligned."""

    name: str
    text: bool = False


@dataclass(frozen=True)
class Table:
    """`more`: number of rows left out."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def _table(caption: str, columns: Iterable[str], rows: Iterable[Sequence[str]], texts: Sequence[str] = ()) -> Table:
    found = tuple(map(tuple, rows))
    heads = tuple(Column(name, name in texts) for name in columns)
    return Table(caption, heads, found[:_MOST_ROWS], max(len(found) - _MOST_ROWS, 0))


def timeline_table(view: TimelineView) -> Table:
    rows = (
        (str(each.rank), _stages(each.stages), spell_time(each.busy, view.unit), f"{each.idle:.1%}") for each in view.ranks
    )
    caption = f"{view.name}: {spell_time(view.makespan, view.unit)} for a step, {view.idle:.1%} idle"
    return _table(caption, ("rank", "stages", "computes", "idle"), rows)


def memory_table(view: MemoryView) -> Table:
    capped = any(each.cap is not None for each in view.ranks)

    def row(at: int) -> Iterator[str]:
        each = view.ranks[at]
        yield from (str(each.rank), *map(spell_bytes, each.peak), spell_bytes(each.together))
        if capped:
            yield from ("", "") if each.cap is None else (spell_bytes(each.cap), f"{each.together / each.cap:.0%}")

    columns = ("rank", *view.kinds, "together", *(("cap", "of the cap") if capped else ()))
    return _table(view.head, columns, (tuple(row(at)) for at in range(len(view.ranks))))


def moment_table(view: MemoryView) -> Table:
    """A row for each of some moments of each rank, including its peak."""
    moments = view.moments(_MOST_ROWS)
    rows = (
        (str(rank), spell_time(time, view.unit), *map(spell_bytes, parts), spell_bytes(sum(parts)))
        for rank, time, parts in moments
    )
    all_there = len(moments) == sum(len(each.times) for each in view.ranks)
    caption = "Over the time of a step" + ("" if all_there else ": the moments with most bytes in equal spans of time")
    return _table(caption, ("rank", "time", *view.kinds, "together"), rows)


def stage_table(stages: Sequence[StageView]) -> Table:
    rows = (
        (
            str(each.stage), str(each.rank), ", ".join(each.modules) or "(no module)", f"{each.parameters:,}",
            spell_bytes(each.parameter_bytes), spell_bytes(each.saved_bytes),
        )
        for each in stages
    )  # fmt: skip
    columns = ("stage", "rank", "modules", "parameters", "parameter bytes", "saved by a microbatch")
    return _table("Stages", columns, rows, ("modules",))


def boundary_table(boundaries: Sequence[BoundaryView]) -> Table:
    rows = (
        (_boundary(each.stage), *map(spell_bytes, (each.forward_bytes, each.backward_bytes, each.relayed_bytes)))
        for each in boundaries
    )
    return _table("Bytes over each boundary, for one microbatch", ("boundary", "forward", "backward", "of relays"), rows)


def value_table(boundaries: Sequence[BoundaryView]) -> Table:
    def rows() -> Iterator[tuple[str, ...]]:
        for each in boundaries:
            for way, values in (("forward", each.forward), ("backward", each.backward)):
                yield from ((_boundary(each.stage), way, *_value(value)) for value in values)

    columns = ("boundary", "way", "value", "shape", "made in", "bytes")
    return _table("Values over each boundary", columns, rows(), columns[1:5])


def relay_table(relays: Sequence[RelayView]) -> Table:
    """A row for each relay, the most expensive first."""
    rows = (
        (*_value(each.value), f"{each.source} → {each.target}", _stages(each.unused) or "none", spell_bytes(each.nbytes))
        for each in sorted(relays, key=lambda each: -each.nbytes)
    )
    columns = ("value", "shape", "made in", "bytes", "stages", "only passed on by", "bytes over all boundaries")
    return _table("Relays, the most expensive first, for one microbatch", columns, rows, columns[:3])


@dataclass(frozen=True)
class PlanTable:
    """The table of plans. `choices`, `results`: its columns; `rows`: by plan; `order`: the rows from the top, the reader's own
    layout first; `alike`: the choices that all plans share, as text."""

    choices: tuple[Column, ...]
    results: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]
    alike: str


def plan_table(plans: Sequence[PlanEntry]) -> PlanTable:
    first = plans[0]
    alike = [cell for cell in first.choices if len(plans) > 1 and all(cell in plan.choices for plan in plans)]
    kept = [[cell for cell in plan.choices if cell not in alike] for plan in plans]
    choices, results = (
        tuple(Column(cell.name, isinstance(cell.value, str)) for cell in cells) for cells in (kept[0], first.results)
    )
    rows = (tuple(cell.text for cell in (*own, *plan.results)) for own, plan in zip(kept, plans, strict=True))
    order = sorted(range(len(plans)), key=lambda at: not plans[at].yours)
    return PlanTable(choices, results, tuple(rows), tuple(order), ", ".join(f"{cell.name} {cell.text}" for cell in alike))


def run_table(run: RunView) -> Table:
    """Losses and seconds of some steps, including the last one."""
    losses, seconds = dict(_steps(run.losses)), dict(_steps(run.seconds))
    steps = sorted({*losses, *seconds})
    stride = -(-len(steps) // _MOST_ROWS) or 1
    shown = steps[::-1][::stride][::-1]
    rows = (
        (str(step), f"{losses[step]:.6g}" if step in losses else "", _seconds(seconds.get(step))) for step in shown
    )
    caption = "Steps" if stride == 1 else f"Every {stride}th recorded step"
    return _table(caption, ("step", "loss", "time"), rows)


def _steps(curve: Curve) -> Iterator[tuple[int, float]]:
    return ((curve.every * number, value) for number, value in enumerate(curve.values, 1))


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None or isnan(seconds) else spell_time(seconds, "s")


def _value(value: ValueView) -> tuple[str, str, str, str]:
    return value.name, value.form, value.maker, spell_bytes(value.nbytes)


def _boundary(stage: int) -> str:
    return f"{stage} | {stage + 1}"


def _stages(stages: Sequence[int]) -> str:
    """`0, 3`, or `0, 1 .. 9` for more than eight."""
    return ", ".join(map(str, stages)) if len(stages) <= 8 else f"{stages[0]}, {stages[1]} .. {stages[-1]}"
