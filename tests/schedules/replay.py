"""Replay a table at unit costs: each rank keeps its order, and each action starts as early as its inputs allow.

An F, I or W of a rank's whole model takes 1, so one of two stages on a rank takes 0.5; a B takes I and W together, an
overlap the sum of its parts; messages take no time. Memory counts microbatches of a rank, from the start of F to the end of
B or W.
"""

from __future__ import annotations

from fractions import Fraction

from graphpp.schedules.table.actions import Action, Kind, upstream
from graphpp.schedules.table.schedule import Schedule


def replayed(schedule: Schedule) -> tuple[float, float]:
    """(makespan, peak activations of any rank)."""
    each = Fraction(schedule.ranks, schedule.stages)
    ends = _ends(schedule, each)
    return float(max(ends.values())), float(each * max(_peak(row) for row in schedule.table))


def idle(schedule: Schedule, rank: int) -> float:
    """The time for which a rank waits between its first action and its last."""
    each = Fraction(schedule.ranks, schedule.stages)
    ends = _ends(schedule, each)
    row = [action for action in schedule.table[rank] if action]
    first, last = row[0].leaves[0], row[-1].leaves[0]
    busy = sum(_cost(action, each) for action in row)
    return float(ends[last] - ends[first] + _cost(row[0], each) - busy)


def _cost(action: Action, each: Fraction) -> Fraction:
    return sum((each * (2 if leaf.kind is Kind.B else 1) for leaf in action.leaves), Fraction(0))


def _ends(schedule: Schedule, each: Fraction) -> dict[Action, Fraction]:
    ends: dict[Action, Fraction] = {}
    free = [Fraction(0)] * schedule.ranks
    todo = [[action for action in row if action][::-1] for row in schedule.table]
    while any(todo):
        before = len(ends)
        for rank, rest in enumerate(todo):
            while rest and (start := _start(rest[-1], ends, free[rank], schedule.stages)) is not None:
                action = rest.pop()
                free[rank] = start + _cost(action, each)
                ends.update(dict.fromkeys(action.leaves, free[rank]))
        assert len(ends) > before, "no rank can go on"
    return ends


def _start(action: Action, ends: dict[Action, Fraction], free: Fraction, stages: int) -> Fraction | None:
    start = free
    for leaf in action.leaves:
        makers = upstream(leaf, stages)
        found = [ends[maker] for maker in makers if maker in ends]
        if makers and not found:
            return None
        start = max([start, *found])
    return start


def _peak(row: tuple[Action | None, ...]) -> int:
    alive = most = 0
    for action in filter(None, row):
        alive += sum(leaf.kind is Kind.F for leaf in action.leaves)
        most = max(most, alive)
        alive -= sum(leaf.kind in (Kind.B, Kind.W) for leaf in action.leaves)
    return most
