"""A schedule is data: the list of actions of each rank. It prints, parses, compares, saves and loads.

`table[rank][column]` is an `Action`, or None where the rank is idle. In a compute-only table made by
`graphpp.schedules.generate` a column is one unit of time; in a table with communication it is only a position. Rows may differ
in length.
    1F1B: 2 stages, 3 microbatches
    r0 0F0 .   0F1 0B0 0F2 0B1 .   0B2
    r1 .   1F0 1B0 1F1 1B1 1F2 1B2
`Schedule.parse(str(s)) == s`, and `Schedule.load(path) == s` after `s.save(path)`. A schedule with `recomputed` set has one
more line, `recompute 0: 1 3; 1: 3` (stage: microbatches).
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

from graphpp.arguments import INDEX, PATH, ROWS, TEXT, checked, one_of, or_none
from graphpp.errors import ScheduleError
from graphpp.schedules.table import recompute_marks
from graphpp.schedules.table.actions import COMMUNICATION, COMPUTE, Action, Kind, parse
from graphpp.schedules.table.recompute_marks import Pairs

Cell = str | Action | None
Row = tuple[Action | None, ...]

_HEADER = re.compile(r"(?P<name>.*): (?P<stages>[0-9]+) stages, (?P<microbatches>[0-9]+) microbatches")
# torch 2.15 writes these cells; graphpp's runner waits for sends and reductions by itself
_TORCH_WAIT = re.compile(r"[0-9]+WAIT_(SEND_F[0-9]+|SEND_B[0-9]+|REDUCE_GRAD)")


@dataclass(frozen=True, repr=False)
class Schedule:
    """The rows of all ranks. Two schedules are equal if their tables and counts are equal; the name is only a label.

    `stages` and `microbatches` are the pipeline's counts, even if the table lacks actions for some of them. `recomputed`: the
    (stage, microbatch) pairs whose backward recomputes forward values; None: `memory.recompute` decides. An R in the table
    recomputes the values of its own pair ahead of the backward (`recomputed_ahead`), listed in `recomputed` or not.
    """

    table: tuple[Row, ...]
    stages: int
    microbatches: int
    name: str = field(default="custom", compare=False)
    recomputed: Pairs | None = None

    def __post_init__(self) -> None:
        if self.recomputed is not None:
            object.__setattr__(self, "recomputed", recompute_marks.as_pairs(self.recomputed))

    @classmethod
    @checked(ScheduleError, rows=ROWS, name=TEXT, stages=or_none(INDEX), microbatches=or_none(INDEX))
    def of(
        cls,
        rows: Iterable[Iterable[Cell]],
        *,
        name: str = "custom",
        stages: int | None = None,
        microbatches: int | None = None,
    ) -> Schedule:
        """Build from one row per rank: actions, action strings, and None, "" or "." for idle, or one string with blanks
        between.
        A missing count is the highest index in the table plus one. Raises `ScheduleError` naming rank and cell (from 1).
        """
        table = tuple(_row(row, f"{name}, rank {rank}") for rank, row in enumerate(rows))
        leaves = [leaf for row in table for action in row if action for leaf in action.leaves]
        return cls(
            table,
            1 + max((leaf.stage for leaf in leaves), default=-1) if stages is None else stages,
            1 + max((leaf.microbatch or 0 for leaf in leaves), default=-1) if microbatches is None else microbatches,
            name,
        )

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: the cached properties cannot be pickled."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def ranks(self) -> int:
        """The number of rows."""
        return len(self.table)

    @cached_property
    def rank_of_stage(self) -> Mapping[int, int]:
        """The rank of each stage; a stage without any action is missing."""
        found: dict[int, int] = {}
        for rank, works in enumerate(self.works):
            for stage, _ in works:
                found.setdefault(stage, rank)
        return MappingProxyType(found)

    @cached_property
    def has_communication(self) -> bool:
        """Whether the table has any send or receive."""
        return any(kind in COMMUNICATION for works in self.works for _, kind in works)

    @cached_property
    def recomputed_ahead(self) -> Pairs:
        """The (stage, microbatch) pairs that have an R."""
        if Kind.R not in self.kinds:
            return frozenset()
        return frozenset((action.stage, action.microbatch or 0) for _, _, action in self.cells() if action.kind is Kind.R)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the computations in the table (F, B, I, W, R), parts of overlaps included."""
        return frozenset(kind for works in self.works for _, kind in works if kind in COMPUTE)

    @cached_property
    def works(self) -> list[dict[tuple[int, Kind], None]]:
        """By rank, the (stage, kind) of all actions, parts instead of wholes, in the order in which they first appear."""
        leaves = ((leaf for action in row if action for leaf in action.parts or (action,)) for row in self.table)
        return [dict.fromkeys(map(itemgetter(0, 1), each)) for each in leaves]

    def forward_only(self) -> Schedule:
        """The table of evaluation: forwards and their messages. Batches stay batches: single messages could wait in a cycle."""
        rows = [[part for action in row if action for part in _forwards(action)] for row in self.table]
        return Schedule.of(rows, name=self.name, stages=self.stages, microbatches=self.microbatches)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """Every (rank, column, action) that is not idle, rank by rank."""
        for rank, row in enumerate(self.table):
            yield from ((rank, column, action) for column, action in enumerate(row) if action is not None)

    def __repr__(self) -> str:
        return f"<Schedule {self._header()}, {self.ranks} ranks>"

    def __str__(self) -> str:
        labels = [f"r{rank}" for rank in range(self.ranks)]
        rows = [[label, *(str(cell or ".") for cell in row)] for label, row in zip(labels, self.table, strict=True)]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        lines = [" ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._header(), *lines, *self._recomputed()])

    def _header(self) -> str:
        return f"{' '.join(self.name.split())}: {self.stages} stages, {self.microbatches} microbatches"

    def _recomputed(self) -> list[str]:
        return [] if self.recomputed is None else [recompute_marks.spell_pairs(self.recomputed)]

    @classmethod
    @checked(ScheduleError, text=TEXT)
    def parse(cls, text: str) -> Schedule:
        """Read the text of `str`, with or without its first line. Raises `ScheduleError` naming line and cell (from 1)."""
        text, pairs = _without_recomputed(text, "schedule text")
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        header = _HEADER.fullmatch(lines[0][1]) if lines else None
        rows = [_labelled(number, line, rank) for rank, (number, line) in enumerate(lines[bool(header) :])]
        if header is None:
            return replace(cls.of(rows), recomputed=pairs)
        counts = {key: int(header[key]) for key in ("stages", "microbatches")}
        return replace(cls.of(rows, name=header["name"], **counts), recomputed=pairs)

    @checked(ScheduleError, path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as CSV in torch's format, idle cells empty; the recompute line comes last. torch reads neither it nor an R."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[str(cell or "") for cell in row] for row in self.table])
        text.writelines(f"{line}\n" for line in self._recomputed())
        try:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        except (OSError, ValueError) as fault:  # ValueError: an impossible path
            raise ScheduleError(f"path: {os.fspath(path)!r} cannot be written: {fault}") from fault

    @classmethod
    @checked(ScheduleError, path=PATH)
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a CSV in torch's format, with or without communication; the name is the path, and the counts are as in `of`.

        The `WAIT_...` cells of torch 2.15 become idle cells. Raises `ScheduleError` naming file, line, cell (from 1) and text.
        """
        file = os.fspath(path)
        text, pairs = _without_recomputed(_text_of(file), file)
        lines = enumerate(io.StringIO(text), 1)  # an empty line is a rank without actions
        rows = [_row(_split(line, f"{file}, line {at}"), f"{file}, line {at}") for at, line in lines]
        return replace(cls.of(rows, name=file), recomputed=pairs)


SCHEDULE = one_of(Schedule, takes="a graphpp.Schedule")


def _without_recomputed(text: str, where: str) -> tuple[str, Pairs | None]:
    """Split off the recompute line if it is the last line of `text`: the rest, and the pairs of that line or None."""
    lines = text.rstrip().splitlines(keepends=True)
    if not lines or not recompute_marks.is_pairs_line(lines[-1]):
        return text, None
    try:
        return "".join(lines[:-1]), recompute_marks.parse_pairs(lines[-1])
    except ScheduleError as fault:
        raise ScheduleError(f"{where}, line {len(lines)}: {fault}") from None


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as fault:  # ValueError: not UTF-8, or an impossible path
        remedy = "; save it as UTF-8" if isinstance(fault, UnicodeDecodeError) else ""
        raise ScheduleError(f"schedule file {file} cannot be read: {fault}{remedy}") from fault


def _split(line: str, where: str) -> list[str]:
    # Line by line, so that a quote left open cannot swallow the ranks that follow.
    try:
        cells = next(csv.reader([line], strict=True))
    except csv.Error as fault:
        raise ScheduleError(f"{where}: {line.strip()!r} is no line of CSV: {fault}") from fault
    return ["" if _TORCH_WAIT.fullmatch(cell.strip()) else cell for cell in cells]


def _row(cells: Iterable[Cell], where: str) -> Row:
    try:
        listed = None if isinstance(cells, Action) else cells.split() if isinstance(cells, str) else list(cells)
    except TypeError:  # no iterable, or a tensor without dimensions
        listed = None
    if listed is None:
        raise ScheduleError(f"{where}: {cells!r} stands where the list of the rank's actions should")
    return tuple(_cell(cell, f"{where}, cell {number}") for number, cell in enumerate(listed, 1))


def _cell(cell: Cell, where: str) -> Action | None:
    if cell is None or isinstance(cell, Action):
        return cell
    text = str(cell).strip()  # str: torch's own `_Action` is written the same way
    try:
        return None if text in ("", ".") else parse(text)
    except ScheduleError as fault:
        raise ScheduleError(f"{where}: {fault}") from None


def _forwards(action: Action) -> tuple[Action, ...]:
    """The part of an action that evaluation runs: forwards and the messages of activations."""
    parts = tuple(leaf for leaf in action.leaves if leaf.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F))
    return (action._replace(parts=parts),) if action.kind is Kind.P2P and len(parts) > 1 else parts


def _labelled(number: int, line: str, rank: int) -> Row:
    label, *cells = line.split()
    if label != f"r{rank}":
        raise ScheduleError(f"schedule text, line {number}: starts with {label!r} where 'r{rank}' should stand")
    return _row(cells, f"schedule text, line {number}")
