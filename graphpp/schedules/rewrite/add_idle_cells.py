"""Puts a table on the clock: idle cells wherever a rank waits for what it reads.

Contract
    `in_time(rows, ...)` keeps the order of every rank and adds None, so that each action stands in the first column
    after those in which its inputs are made, and after the action before it: a column is one unit of time, the same
    for any action, and messages take none. Idle cells that stand in a row already are kept, as a wait of their own.

        r0 0F0 0B0            r0 0F0 .   .   0B0
        r1 1F0 1B0     ->     r1 .   1F0 1B0
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind, upstream
from graphpp.schedules.table.schedule import Row

Cells = list[Action | None]
_READING = (Kind.F, Kind.B, Kind.I)


def in_time(
    rows: Sequence[Iterable[Action | None]],
    stages: int,
    waiting: Collection[Kind] = _READING,
    fill: bool = False,
) -> tuple[Row, ...]:
    """The rows with idle cells; only actions of the kinds in `waiting` wait for their inputs.

    `fill`: a rank that would wait runs its next W instead, if that one's I is done. Raises `ScheduleError` if no rank
    can go on.
    """
    todo: list[Cells] = [list(row)[::-1] for row in rows]
    done: list[Cells] = [[] for _ in rows]
    made: set[Action] = set()
    while any(todo):
        at = [_next(rest, made, stages, waiting, fill) if rest else None for rest in todo]
        if at == [None] * len(rows):
            raise ScheduleError(f"no rank can go on: they stop at {', '.join(str(rest[-1]) for rest in todo if rest)}")
        for rest, past, index in zip(todo, done, at, strict=True):
            if rest:
                past.append(None if index is None else rest.pop(index))
                made.update(past[-1].leaves if past[-1] else ())
    return tuple(map(tuple, done))


def _next(rest: Cells, made: set[Action], stages: int, waiting: Collection[Kind], fill: bool) -> int | None:
    """The index of what a rank runs now, out of what is left of its row, last first; None if it waits."""
    head = rest[-1]
    if head is None or _ready(head, made, stages, waiting):
        return -1
    weight = next((at for at in range(len(rest) - 1, -1, -1) if _is_weight(rest[at])), None) if fill else None
    cell = None if weight is None else rest[weight]
    return weight if cell and cell._replace(kind=Kind.I) in made else None


def _is_weight(cell: Action | None) -> bool:
    return cell is not None and cell.kind is Kind.W


def _ready(action: Action, made: set[Action], stages: int, waiting: Collection[Kind]) -> bool:
    for leaf in action.leaves:
        makers = upstream(leaf, stages) if leaf.kind in waiting else ()
        if makers and not any(maker in made for maker in makers):
            return False
    return True
