"""The same schedule with its backwards split, or whole: what a profile runs to know the costs of both.

Contract: any table in, a table with the same forwards on the same ranks out, without overlaps and messages; if the one can
run to its end so can the other, since whatever a backward makes for others it makes no later in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphpp.runtime.actions import Action, Kind
from graphpp.runtime.schedule import Schedule


def split_backwards(schedule: Schedule) -> Schedule:
    """Each B becomes I and, right after it, W."""
    return _rewritten(schedule, _split)


def whole_backwards(schedule: Schedule) -> Schedule:
    """Each I becomes B, and each W goes."""
    return _rewritten(schedule, _whole)


def _rewritten(schedule: Schedule, rewrite: Callable[[Action], Iterator[Action]]) -> Schedule:
    leaves = [[leaf for action in row if action and action.is_compute for leaf in action.leaves] for row in schedule.table]
    return replace(schedule, table=tuple(tuple(new for leaf in row for new in rewrite(leaf)) for row in leaves))


def _split(leaf: Action) -> Iterator[Action]:
    if leaf.kind is not Kind.B:
        yield leaf
        return
    yield leaf._replace(kind=Kind.I)
    yield leaf._replace(kind=Kind.W)


def _whole(leaf: Action) -> Iterator[Action]:
    if leaf.kind is not Kind.W:
        yield leaf._replace(kind=Kind.B) if leaf.kind is Kind.I else leaf
