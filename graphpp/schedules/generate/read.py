"""Read the `schedule=` option of a user into a `Schedule`.

    a name                     "1F1B", in any case; one of `graphpp.schedules.generate.names.SCHEDULES`
    a file                     a string that ends in `.csv`, or any `os.PathLike`: CSV in torch's format
    a table                    a list of rows, or a dict rank -> row, of action strings, `Action`s, and None
    a function                 (ranks, stages, microbatches) -> a `Schedule` or a table, `functools.partial` included
    a `Schedule`

A file and a table have their own counts: the highest stage and microbatch in them plus one.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping

from graphpp.arguments import Accepted, callback, shown, unfit
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import ALIASES, SCHEDULES, Generator
from graphpp.schedules.table.placement import usual_stages
from graphpp.schedules.table.schedule import Cell, Schedule

TableLike = Mapping[int, Iterable[Cell]] | Iterable[Iterable[Cell]]
ScheduleFunction = Callable[[int, int, int], Schedule | TableLike]
_FORMS = "a name, a Schedule, a .csv path, a function or rows"
_TABLE = Accepted(
    "a Schedule, or the rows of a table",
    lambda value: isinstance(value, Schedule | Iterable) and not isinstance(value, str | bytes),
)
ScheduleLike = Schedule | str | os.PathLike[str] | ScheduleFunction | TableLike


def load_schedule(source: ScheduleLike) -> Schedule | str | ScheduleFunction:
    """Turn a file or a table into its `Schedule`; return a `Schedule`, a known name or a function unchanged.

    A file or an iterator over rows is read once, here. Raises `ScheduleError` for an unknown name, file or table.
    """
    if isinstance(source, Schedule):
        return source
    if isinstance(source, str) and not source.strip().casefold().endswith(".csv"):
        _by_name(source)
        return source
    if isinstance(source, str | os.PathLike):
        return Schedule.load(source.strip() if isinstance(source, str) else source)
    if isinstance(source, type):
        raise ScheduleError(f"take {_FORMS}, got {shown(source)}")
    return source if callable(source) else _of_table(source)


def make_table(source: ScheduleLike, ranks: int, stages: int, microbatches: int) -> Schedule:
    """Make the schedule of `source` for these counts; a file, a table or a `Schedule` keeps its own counts.

    Raises `ScheduleError` for a source that `load_schedule` cannot read, for a named schedule that does not fit the counts, and
    for a function that does not take three counts, raises, or returns no table.
    """
    known = load_schedule(source)
    if isinstance(known, Schedule):
        return known
    if isinstance(known, str):
        return _by_name(known)(ranks, stages, microbatches)
    fault = unfit(known, 3)
    if fault is not None:
        name = getattr(known, "__name__", type(known).__name__)
        raise ScheduleError(f"the schedule function {name} must take (ranks, stages, microbatches): {fault}")
    made = callback(ScheduleError, "schedule", _TABLE, known)(ranks, stages, microbatches)
    return made if isinstance(made, Schedule) else _of_table(made)


def default_stages(source: ScheduleLike, ranks: int) -> int:
    """The number of stages to make if the user gives none.

    A file, a table or a `Schedule` has its own number. A named schedule has the number of its generator
    (`placement.stages_per_rank`), also inside a `functools.partial`. Any other function gets one per rank. Raises as
    `load_schedule`.
    """
    known = load_schedule(source)
    if isinstance(known, Schedule):
        return known.stages
    made_by: object = _by_name(known) if isinstance(known, str) else known
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    return usual_stages(made_by, ranks)


def _by_name(name: str) -> Generator:
    known = {key.casefold(): key for key in (*SCHEDULES, *ALIASES)}
    wanted = name.strip().casefold()
    if wanted in known:
        name = known[wanted]
        return SCHEDULES[ALIASES.get(name, name)]
    near = [known[key] for key in difflib.get_close_matches(wanted, known, cutoff=0.4)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ScheduleError(f"unknown schedule {name!r}; {hint}Known: {', '.join(SCHEDULES)}, or the path of a .csv file")


def _of_table(table: TableLike) -> Schedule:
    if isinstance(table, Mapping):
        if set(table) != set(range(len(table))):
            raise ScheduleError(f"a schedule given as a dict needs a row for each rank from 0 on, not {list(table)}")
        table = [table[rank] for rank in range(len(table))]
    if not isinstance(table, Iterable):
        raise ScheduleError(f"{shown(table)} is no schedule; give {_FORMS}")
    return Schedule.of(table)
