"""The same schedule in a plainer form: its overlaps taken apart, its split backwards whole.

Contract: any table in, a table with the same forwards on the same ranks out; if the one can run to its end so can the other,
since whatever an action makes for other ranks it makes no later in the order. (`deferral.split_backwards` is the way back.)
"""

from __future__ import annotations

from dataclasses import replace

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule


def without_overlaps(schedule: Schedule) -> Schedule:
    """The computations alone, the parts of an overlap one after the other."""
    rows = ((action for action in row if action and action.is_compute) for row in schedule.table)
    return replace(schedule, table=tuple(tuple(leaf for action in row for leaf in action.leaves) for row in rows))


def merge_backward(schedule: Schedule) -> Schedule:
    """The computations alone, each I as a B, without the Ws."""
    rows = ((leaf for leaf in row if leaf and leaf.kind is not Kind.W) for row in without_overlaps(schedule).table)
    whole = ((leaf._replace(kind=Kind.B) if leaf.kind is Kind.I else leaf for leaf in row) for row in rows)
    return replace(schedule, table=tuple(map(tuple, whole)))
