"""Simplify a schedule: overlaps into single computations, split backwards into whole ones.

Contract: the result has the same forwards on the same ranks, without messages and idle cells. If the input table runs to its
end, so does the result, since every computation that another rank reads keeps its place in the row or moves ahead. The
inverse of `merge_backward` is `split_backward.split_backward`.
"""

from __future__ import annotations

from dataclasses import replace

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule


def without_overlaps(schedule: Schedule) -> Schedule:
    """The computations alone, the parts of each overlap one after the other."""
    rows = ((action for action in row if action and action.is_compute) for row in schedule.table)
    return replace(schedule, table=tuple(tuple(leaf for action in row for leaf in action.leaves) for row in rows))


def merge_backward(schedule: Schedule) -> Schedule:
    """The computations alone, each I replaced by its B, the Ws dropped."""
    rows = ((leaf for leaf in row if leaf and leaf.kind is not Kind.W) for row in without_overlaps(schedule).table)
    whole = ((leaf._replace(kind=Kind.B) if leaf.kind is Kind.I else leaf for leaf in row) for row in rows)
    return replace(schedule, table=tuple(map(tuple, whole)))
