"""Moves weight gradients: a backward B becomes I, where it stood, and W, later. Nothing else of a table changes.

Contract
    in    a table, compute-only or with communication; actions in overlaps are split too
    out   the same table with I in the place of B, and the Ws that were split off, or that are held back, elsewhere on
          their rank, in the order of their Is. What `graphpp.schedules.check.checker.check` accepts stays acceptable: no other
          rank ever waits for a W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Row, Schedule

Selector = Callable[[Action], bool]


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

    return _with(schedule, map(row, schedule.table))


def defer_weight_grads(
    schedule: Schedule,
    stages: Iterable[int],
    *,
    until: Literal["idle", "end"] = "idle",
    limit: int | None = None,
) -> Schedule:
    """Hold the weight gradients of some stages back into the cool-down, where ranks wait for each other anyway.

    r0 0F0 0F1 0B0 .   0B1      ->     r0 0F0 0F1 0I0 0W0 0I1 0W1
    r1 .   1F0 1B0 1F1 1B1             r1 .   1F0 1B0 1F1 1B1

    Above: stage 0. `until` "idle": a W takes the first idle cell after the rank's last forward and after its I; those
    for which there is none come after the rank's last action. "end": all of them come after it. `limit`: only the
    first so many microbatches of a stage; the others keep their B, which bounds the memory held (Megatron-Core's
    `wgrad_deferral_limit`, for which 0 is all; its `defer_embedding_wgrad_compute` is the stage with the LM head).

    Columns of a table on the clock stay units of time. Raises `ScheduleError` for a stage that is not there, a value
    of `until` that is none, and a table whose REDUCE_GRAD or RESHARD would come before a W that
    is held back.
    """
    chosen = frozenset(stages)
    _check(schedule, chosen, until)

    def held(leaf: Action) -> bool:
        early = limit is None or (leaf.microbatch or 0) < limit
        return leaf.stage in chosen and leaf.kind in (Kind.B, Kind.W) and early

    return _with(schedule, [_deferred(row, held, until) for row in schedule.table])


def _check(schedule: Schedule, stages: frozenset[int], until: str) -> None:
    strange = sorted(stages - set(range(schedule.stages)))
    if strange:
        raise ScheduleError(f"{schedule.name} has no stage {strange[0]}; its stages are 0..{schedule.stages - 1}")
    if until not in ("idle", "end"):
        raise ScheduleError(f"weight gradients can be held back until 'idle' or 'end', not {until!r}")
    for rank, column, action in schedule.cells():
        if action.kind in (Kind.REDUCE_GRAD, Kind.RESHARD) and action.stage in stages:
            raise ScheduleError(
                f"{schedule.name}, rank {rank}, column {column}: {action} would run before the weight gradients that "
                "are held back; hold them back first, then add what shards and reduces"
            )


def _deferred(row: Row, held: Selector, until: str) -> Row:
    last_forward = max((at for at, cell in enumerate(row) if cell and _has(cell, Kind.F)), default=-1)
    cells: list[Action | None] = []
    waiting: deque[Action] = deque()
    for column, action in enumerate(row):
        kept, weights = _split(action, held)
        waiting += weights
        if kept is None and waiting and until == "idle" and column > last_forward:
            kept = waiting.popleft()
        cells.append(kept)
    while cells and cells[-1] is None:
        cells.pop()
    return (*cells, *waiting)


def _has(action: Action, kind: Kind) -> bool:
    return any(leaf.kind is kind for leaf in action.leaves)


def _split(action: Action | None, held: Selector) -> tuple[Action | None, list[Action]]:
    """What is left of an action without the Ws that are held back, None if nothing, and those Ws."""
    leaves = action.leaves if action else ()
    kept = [
        leaf._replace(kind=Kind.I) if held(leaf) else leaf
        for leaf in leaves
        if leaf.kind is not Kind.W or not held(leaf)
    ]
    weights = [leaf._replace(kind=Kind.W) for leaf in leaves if held(leaf)]
    if action is None or len(kept) < 2:
        return (kept[0] if kept else None), weights
    return action._replace(parts=tuple(kept)), weights


def _with(schedule: Schedule, rows: Iterable[Row]) -> Schedule:
    return replace(schedule, table=tuple(rows))
