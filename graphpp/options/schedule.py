"""`schedule=`: the reader is that of the schedules; this file describes a schedule to other ranks."""

from __future__ import annotations

from graphpp.schedules.generate.read import ScheduleFunction
from graphpp.schedules.generate.read import load_schedule as read
from graphpp.schedules.table.schedule import Schedule

__all__ = ["describe", "read"]


def describe(schedule: Schedule | str | ScheduleFunction) -> list[str]:
    """The schedule as text that is the same on every rank: a name, all rows of a table, the name of a function."""
    if isinstance(schedule, Schedule):
        return str(schedule).splitlines()
    if isinstance(schedule, str):
        return [schedule]
    return [f"the function {getattr(schedule, '__qualname__', type(schedule).__name__)}"]
