"""The bytes alive on each rank over the events of a step, with the lifetimes of `graphpp.schedules.table.costs`.

Contract: events in, a curve of (time, bytes alive from then on) per rank out; nothing about the events is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from graphpp.schedules.simulate.timeline import Event
from graphpp.schedules.table.costs import Costs

Curve = tuple[tuple[float, int], ...]


def memory_curves(events: Sequence[Event], costs: Costs, ranks: int) -> tuple[Curve, ...]:
    """The curve of each rank; bytes freed and taken at one moment count as one change."""
    changes: list[dict[float, int]] = [defaultdict(int) for _ in range(ranks)]
    for event in events:
        for leaf in event.action.leaves if event.action.is_compute else ():
            start, end = costs.stages[leaf.stage].change(leaf.kind)
            changes[event.rank][event.start] += start
            changes[event.rank][event.end] += end
    return tuple(_curve(found) for found in changes)


def _curve(changes: dict[float, int]) -> Curve:
    times = sorted(changes)
    return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))
