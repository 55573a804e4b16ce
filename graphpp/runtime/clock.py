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
from graphpp.runtime.actions import Action, Kind, upstream
from graphpp.runtime.schedule import Row

_READING = (Kind.F, Kind.B, Kind.I)


def in_time(
    rows: Sequence[Iterable[Action | None]], stages: int, waiting: Collection[Kind] = _READING
) -> tuple[Row, ...]:
    """The rows with idle cells; only actions of the kinds in `waiting` wait for their inputs.

    Raises `ScheduleError` if no rank can go on.
    """
    todo = [list(row)[::-1] for row in rows]
    done: list[list[Action | None]] = [[] for _ in rows]
    made: set[Action] = set()
    while any(todo):
        column: list[Action] = []
        stuck = True
        for rest, past in zip(todo, done, strict=True):
            if not rest:
                continue
            ready = rest[-1] is None or _ready(rest[-1], made, stages, waiting)
            past.append(rest.pop() if ready else None)
            stuck = stuck and not ready
            column += past[-1].leaves if past[-1] else ()
        if stuck:
            raise ScheduleError(f"no rank can go on: they stop at {', '.join(str(rest[-1]) for rest in todo if rest)}")
        made.update(column)
    return tuple(map(tuple, done))


def _ready(action: Action, made: Collection[Action], stages: int, waiting: Collection[Kind]) -> bool:
    for leaf in action.leaves:
        makers = upstream(leaf, stages) if leaf.kind in waiting else ()
        if makers and not any(maker in made for maker in makers):
            return False
    return True
