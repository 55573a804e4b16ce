"""The description of `schedule=` for other ranks; `load_schedule` of the schedules reads the option."""

from __future__ import annotations

from graphpp.schedules.generate.read import ScheduleFunction
from graphpp.schedules.table.schedule import Schedule


def describe_schedule(schedule: Schedule | str | ScheduleFunction) -> list[str]:
    """The schedule as text that is the same on every rank: a name, all rows of a table, the name of a function."""
    if isinstance(schedule, Schedule):
        return str(schedule).splitlines()
    if isinstance(schedule, str):
        return [schedule]
    return [f"the function {getattr(schedule, '__qualname__', type(schedule).__name__)}"]
