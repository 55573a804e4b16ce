"""Add idle cells (None) wherever a rank waits for its inputs, so that columns are units of time. Rows keep their order.

Each action is in the first column after its inputs and after the previous action of its row. A column is one unit of time, the
same for every action; messages take no time. Idle cells that a row already has are kept and take a column each.
    r0 0F0 0B0            r0 0F0 .   .   0B0
    r1 1F0 1B0     ->     r1 .   1F0 1B0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from graphpp.arguments import INDEX, Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind, upstream
from graphpp.schedules.table.in_order import in_order
from graphpp.schedules.table.schedule import Row

Cells = list[Action | None]
_READING = (Kind.F, Kind.B, Kind.I)


_ACTIONS = Accepted(
    "a list of rows of actions and None",
    lambda value: isinstance(value, Sequence)
    and not isinstance(value, str | bytes)
    and all(isinstance(row, Iterable) and all(isinstance(cell, Action | None) for cell in row) for row in value),
)


@checked(ScheduleError, rows=_ACTIONS, stages=INDEX)
def add_idle_cells(
    rows: Sequence[Iterable[Action | None]],
    stages: int,
    waiting: Collection[Kind] = _READING,
    fill: bool = False,
) -> tuple[Row, ...]:
    """The rows with idle cells; only actions of the kinds in `waiting` wait for their inputs.

    `fill`: a rank that would wait runs its next W instead, if that W's I is done. Raises `ScheduleError` for a deadlock.
    """
    rows = [list(row) for row in rows]
    clock = _Clock(stages, waiting)
    timed: list[Cells] = [[] for _ in rows]
    weights = [deque(cell for cell in row if fill and _is_weight(cell)) for row in rows]
    for rank, cell in in_order(rows, lambda _, cell: clock.start(cell) is not None):
        early, before = weights[rank], timed[rank]
        if fill and _is_weight(cell):
            if not early or early[0] != cell:
                continue  # this W ran in an earlier wait
            early.popleft()
        while len(before) < (clock.start(cell) or 0):
            before.append(early.popleft() if early and early[0]._replace(kind=Kind.I) in clock.column else None)
        clock.column.update((leaf, len(before)) for leaf in (cell.leaves if cell else ()))
        before.append(cell)
    return tuple(map(tuple, timed))


def _is_weight(cell: Action | None) -> TypeGuard[Action]:
    return cell is not None and cell.kind is Kind.W


@dataclass
class _Clock:
    """`column`: the column of each computation so far."""

    stages: int
    waiting: Collection[Kind]
    column: dict[Action, int] = field(default_factory=dict)

    def start(self, cell: Action | None) -> int | None:
        """The first column in which all inputs of a cell have arrived; None while one of them has not run."""
        first = 0
        for leaf in cell.leaves if cell else ():
            makers = upstream(leaf, self.stages) if leaf.kind in self.waiting else ()
            found = [self.column[maker] for maker in makers if maker in self.column]
            if makers and not found:
                return None
            first = max(first, 1 + min(found, default=-1))
        return first
