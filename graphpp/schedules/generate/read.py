"""What a user may give as a schedule, read into a `Schedule`.

    a name                     "1F1B", in any case; `graphpp.schedules.generate.names.SCHEDULES` has them
    a file                     a string that ends in `.csv`, or any `os.PathLike`: CSV in torch's format
    a table                    a list of rows, or a dict rank -> row, of action strings, `Action`s, and None
    a function                 (ranks, stages, microbatches) -> a `Schedule` or a table, `functools.partial` included
    a `Schedule`

Contract
    Nothing here judges whether a table makes sense or fits the pipeline: `graphpp.schedules.check.checker.check` does. A file
    and a table have their own counts, the highest stage and microbatch in them plus one. `ScheduleError` names what
    cannot be read: an unknown name with the nearest ones, a file with its path, a table with rank and cell.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import ALIASES, SCHEDULES, Generator
from graphpp.schedules.table.placement import usual_stages
from graphpp.schedules.table.schedule import Cell, Schedule

TableLike = Mapping[int, Iterable[Cell]] | Iterable[Iterable[Cell]]
ScheduleFunction = Callable[[int, int, int], Schedule | TableLike]
ScheduleLike = Schedule | str | os.PathLike[str] | ScheduleFunction | TableLike


def load_schedule(source: ScheduleLike) -> Schedule | str | ScheduleFunction:
    """A file or a table as its `Schedule`; a `Schedule`, a known name and a function stay as they are.

    What is read once stays, whatever becomes of the file, or of an iterator over rows. Raises `ScheduleError`.
    """
    if isinstance(source, Schedule):
        return source
    if isinstance(source, str) and not source.strip().casefold().endswith(".csv"):
        _by_name(source)
        return source
    if isinstance(source, str | os.PathLike):
        return Schedule.load(source.strip() if isinstance(source, str) else source)
    return source if callable(source) else _of_table(source)


def make_table(source: ScheduleLike, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule that `source` means for these counts; of a file, a table or a `Schedule` the one that stands there.

    Raises `ScheduleError`: for a source that `load_schedule` cannot read, and for a named schedule that does not fit.
    """
    known = load_schedule(source)
    if isinstance(known, Schedule):
        return known
    maker = _by_name(known) if isinstance(known, str) else known
    _check_takes(maker, ranks, stages, microbatches)
    made = maker(ranks, stages, microbatches)
    return made if isinstance(made, Schedule) else _of_table(made)


def default_stages(source: ScheduleLike, ranks: int) -> int:
    """How many stages to make where the user leaves it open.

    Those of a file, a table or a `Schedule`; else two per rank for a named schedule that takes several, and one per
    rank for the others and for a function, which makes its table for any number. A generator of graphpp, also in a
    `functools.partial`, counts as its name. Raises what `load_schedule` raises.
    """
    known = load_schedule(source)
    if isinstance(known, Schedule):
        return known.stages
    made_by: object = _by_name(known) if isinstance(known, str) else known
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    return usual_stages(made_by, ranks)


def _check_takes(maker: ScheduleFunction, *counts: int) -> None:
    """Raise where a function cannot be called with the three counts."""
    try:
        inspect.signature(maker).bind(*counts)
    except TypeError as fault:
        name = getattr(maker, "__name__", type(maker).__name__)
        raise ScheduleError(f"the schedule function {name} must take (ranks, stages, microbatches): {fault}") from None
    except ValueError:  # no signature to be had, as of some builtins
        return


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
        raise ScheduleError(f"{table!r} is no schedule; give a name, a Schedule, a .csv path, a function or rows")
    return Schedule.of(table)
