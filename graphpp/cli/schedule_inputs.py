"""Schedules on the command line: a name of `graphpp.schedules.SCHEDULES`, or a file.

A file is torch's CSV, with or without communication (`Schedule.load`; named `.csv`); the text of `graphpp schedule show`
(`Schedule.parse`); or, as CSV or text, Megatron-Core's orders (`schedules.from_orders`): a line per rank with the signed
numbers of its chunks, +c a forward, -c a backward. A known name is never taken for a file.

Raises `GraphPPError` for an unknown name or unreadable file, `ScheduleError` for a file's content and for unfitting counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from graphpp.errors import GraphPPError, ScheduleError
from graphpp.schedules.generate.megatron_interleaved import from_orders
from graphpp.schedules.generate.names import ALIASES, SCHEDULES
from graphpp.schedules.generate.read import default_stages, load_schedule, make_table
from graphpp.schedules.table.schedule import Schedule

SCHEDULE_HELP = "A name such as 1F1B or ZBVZeroBubble, or a file: torch's CSV, the text of `schedule show`, Megatron's orders."
_ORDER = re.compile(r"[+-]?[0-9]{1,6}(\.[05])?")
_MOST_BYTES = 2**28


@dataclass(frozen=True)
class Counts:
    """The given counts for a table; None: not given. `costs`: the number of stages with costs."""

    ranks: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    costs: int | None = None

    def given(self) -> dict[str, int]:
        """The counts that were given for the table itself, by their names."""
        return {name: count for name, count in vars(self).items() if count is not None and name != "costs"}


def complete_name(incomplete: str) -> list[str]:
    """The schedule names that complete a prefix in a shell."""
    return [name for name in (*SCHEDULES, *ALIASES) if name.casefold().startswith(incomplete.casefold())]


def read_schedule(text: str) -> Schedule | str:
    """A known name unchanged, a file as its table."""
    if text.strip().casefold() in {name.casefold() for name in (*SCHEDULES, *ALIASES)}:
        return text
    path = Path(text)
    if path.suffix.casefold() in (".csv", ".txt") or "/" in text or path.exists():
        return _read_file(path)
    try:
        load_schedule(text)
    except ScheduleError as fault:
        raise GraphPPError(f"{fault}; there is no file of this name either") from None
    raise AssertionError(f"{text!r} is no known name")


def table_of(text: str, counts: Counts) -> Schedule:
    """The table of a name or file.

    A name needs ranks and microbatches; stages default to those of the costs, then to its usual number. Counts that are given
    for a file must equal the file's own.
    """
    source = read_schedule(text)
    if not isinstance(source, Schedule):
        return table_by_name(source, counts)
    for name, count in counts.given().items():
        if count != (own := getattr(source, name)):
            raise ScheduleError(f"--{name}: {source.name} has {own} {name}, not {count}: leave the option out")
    return source


def table_by_name(name: str, counts: Counts) -> Schedule:
    """The table of a known name. Raises `GraphPPError` if a needed count is missing."""
    if counts.ranks is None or counts.microbatches is None:
        missing = [f"--{each}" for each in ("ranks", "microbatches") if getattr(counts, each) is None]
        raise GraphPPError(f"{name} is a schedule for any number of ranks and microbatches: give {' and '.join(missing)}")
    stages = counts.stages or counts.costs or default_stages(name, counts.ranks)
    return make_table(name, counts.ranks, stages, counts.microbatches)


def readable(path: Path) -> str:
    """The text of a file. Raises `GraphPPError` if it cannot be opened, is no text, or is very large."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise GraphPPError(f"{path} is larger than {_MOST_BYTES >> 20} MiB, which no schedule is")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise GraphPPError(f"{path} is no text in UTF-8: {fault}") from fault
    except (OSError, ValueError) as fault:  # ValueError: an impossible path
        raise GraphPPError(f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}") from fault


def _read_file(path: Path) -> Schedule:
    found = _parsed(path, readable(path))
    if not any(True for _ in found.cells()):
        raise ScheduleError(f"{path} has no action: write a line for each rank, such as 0F0,0B0")
    return found


def _parsed(path: Path, text: str) -> Schedule:
    lines = [re.split(r"[,\s]+", line.strip(" \t,")) for line in text.splitlines() if line.strip(" \t,")]
    if lines and all(_ORDER.fullmatch(cell) for line in lines for cell in line):
        return from_orders([[float(cell) for cell in line] for line in lines], name=str(path))
    if path.suffix.casefold() == ".csv":
        return Schedule.load(path)
    try:
        found = Schedule.parse(text)
    except ScheduleError as fault:
        raise ScheduleError(f"{path}: {fault}; if the file is CSV, its name must end in .csv") from None
    return found if found.name != "custom" else replace(found, name=str(path))
