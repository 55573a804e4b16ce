"""Timelines to draw: place any table in time with any costs, by a few lines that share no code with the simulator.

Contract: an action starts when its rank is free and its inputs have been computed on any rank; messages take no time.
`placed` raises if the table cannot run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.actions import Action, upstream
from graphpp.schedules.table.schedule import Schedule


def units(action: Action) -> float:
    """Costs of one unit of time for each F, B, I and W."""
    return float(len(action.leaves))


def placed(schedule: Schedule, cost: Callable[[Action], float] = units, unit: str = "units") -> Timeline:
    """The computations of a table in time, and the bytes alive: 1000 for each F until its B or W."""
    rows = [deque(action for action in row if action and action.is_compute) for row in schedule.table]
    free, ended, events = [0.0] * len(rows), dict[Action, float](), list[Event]()
    while any(rows):
        ready = [rank for rank, row in enumerate(rows) if row and _can_start(row[0], ended, schedule.stages)]
        assert ready, "the table cannot run"
        for rank in ready:
            action = rows[rank].popleft()
            made = [ended[each] for leaf in action.leaves for each in upstream(leaf, schedule.stages) if each in ended]
            start = max([free[rank], *made])
            free[rank] = start + cost(action)
            ended.update(dict.fromkeys(action.leaves, free[rank]))
            events.append(Event(rank, action, start, free[rank]))
    events.sort(key=lambda event: (event.rank, event.start))
    return Timeline(schedule, tuple(events), tuple(_memory(rank, events) for rank in range(len(rows))), "placed", unit)


def _can_start(action: Action, ended: dict[Action, float], stages: int) -> bool:
    needs = [upstream(leaf, stages) for leaf in action.leaves]
    return all(not makers or any(maker in ended for maker in makers) for makers in needs)


def _memory(rank: int, events: list[Event]) -> tuple[tuple[float, int], ...]:
    changes = []
    for event in (event for event in events if event.rank == rank):
        kinds = [leaf.kind.value for leaf in event.action.leaves]
        changes += [(event.start, 1000)] * kinds.count("F")
        changes += [(event.end, -1000)] * sum(kinds.count(kind) for kind in "BW")
    alive, points = 0, []
    for time, change in sorted(changes):
        alive += change
        points.append((time, alive))
    return tuple(points)
