"""Split backwards: a whole backward B becomes I, in its place, and W, later. And the inverse: merge I and W to B.

`split_backward` and `defer_weight_grads` take tables with or without communication, and split backwards inside overlaps too. A
rank's Ws keep the order of their Is. `check` accepts the result if it accepted the input, since no other rank waits for a W.
`merge_backward` and `without_overlaps` drop messages and idle cells; a table that runs to its end still does, since every
computation that another rank reads keeps its place in the row or moves ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from graphpp.arguments import INTEGER, ROWS, checked, require
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import SCHEDULE, Row, Schedule

Selector = Callable[[Action], bool]


@checked(ScheduleError, schedule=SCHEDULE)
def split_backward(schedule: Schedule) -> Schedule:
    """Every B as an I with its W directly after it.

    r0 0F0 .   0B0      ->     r0 0F0 .   0I0 0W0
    """

    def row(actions: Row) -> Row:
        cells: list[Action | None] = []
        for action in actions:
            split, weights = _split(action, lambda leaf: leaf.kind is Kind.B)
            cells += [split, *weights]
        return tuple(cells)

    return replace(schedule, table=tuple(map(row, schedule.table)))


def without_overlaps(schedule: Schedule) -> Schedule:
    """The computations alone, the parts of each overlap one after the other."""
    rows = ((action for action in row if action and action.is_compute) for row in schedule.table)
    return replace(schedule, table=tuple(tuple(leaf for action in row for leaf in action.leaves) for row in rows))


def merge_backward(schedule: Schedule) -> Schedule:
    """The computations alone, each I replaced by its B, the Ws dropped."""
    rows = ((leaf for leaf in row if leaf and leaf.kind is not Kind.W) for row in without_overlaps(schedule).table)
    whole = ((leaf._replace(kind=Kind.B) if leaf.kind is Kind.I else leaf for leaf in row) for row in rows)
    return replace(schedule, table=tuple(map(tuple, whole)))


@checked(ScheduleError, schedule=SCHEDULE, stages=ROWS)
def defer_weight_grads(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Delay the weight gradients of some stages into the cool-down, where ranks wait for each other anyway.

    r0 0F0 0F1 0B0 .   0B1      ->     r0 0F0 0F1 0I0 0W0 0I1 0W1
    r1 .   1F0 1B0 1F1 1B1             r1 .   1F0 1B0 1F1 1B1

    Above: stage 0. A W takes the first idle cell after the rank's last forward and after its I, else a cell after the rank's
    last action. Megatron-Core's `defer_embedding_wgrad_compute` is the stage with the LM head.

    Raises `ScheduleError` for a stage that does not exist, and for a table
    whose REDUCE_GRAD or RESHARD would come before a delayed W.
    """
    chosen = frozenset(stages)
    for stage in chosen:
        require(ScheduleError, "stages", INTEGER, stage)
    strange = sorted(chosen - set(range(schedule.stages)))
    if strange:
        raise ScheduleError(f"{schedule.name} has no stage {strange[0]}; its stages are 0..{schedule.stages - 1}")
    for rank, column, action in schedule.cells():
        if action.kind in (Kind.REDUCE_GRAD, Kind.RESHARD) and action.stage in chosen:
            raise ScheduleError(
                f"{schedule.name}, rank {rank}, column {column}: {action} would run before the weight gradients that "
                "are held back; hold them back first, then add the actions of sharded stages"
            )

    def delayed(leaf: Action) -> bool:
        return leaf.stage in chosen and leaf.kind in (Kind.B, Kind.W)

    return replace(schedule, table=tuple(_deferred(row, delayed) for row in schedule.table))


def _deferred(row: Row, selected: Selector) -> Row:
    forwards = [at for at, cell in enumerate(row) if cell and any(leaf.kind is Kind.F for leaf in cell.leaves)]
    last_forward = max(forwards, default=-1)
    cells: list[Action | None] = []
    waiting: deque[Action] = deque()
    for column, action in enumerate(row):
        rest, weights = _split(action, selected)
        waiting += weights
        if rest is None and waiting and column > last_forward:
            rest = waiting.popleft()
        cells.append(rest)
    while cells and cells[-1] is None:
        cells.pop()
    return (*cells, *waiting)


def _split(action: Action | None, selected: Selector) -> tuple[Action | None, list[Action]]:
    """(the action without its delayed Ws or None if nothing is left, the delayed Ws)."""
    leaves = action.leaves if action else ()
    rest = [
        leaf._replace(kind=Kind.I) if selected(leaf) else leaf
        for leaf in leaves
        if leaf.kind is not Kind.W or not selected(leaf)
    ]
    weights = [leaf._replace(kind=Kind.W) for leaf in leaves if selected(leaf)]
    if action is None or len(rest) < 2:
        return (rest[0] if rest else None), weights
    return action._replace(parts=tuple(rest)), weights
