"""A schedule while it is checked: the counts it must fit, the cell of each action, and how an error shows a fault.

`where` maps every single action to its cell (a part of an overlap or batch to the cell of the whole), in row order. The first
step of `checker.py` fills it and every later step reads it. Ranks and columns in error messages count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, message
from graphpp.schedules.table.schedule import Schedule


class Position(NamedTuple):
    """A cell of the table: `table[rank][column]`."""

    rank: int
    column: int


class Crossing(NamedTuple):
    """A result that crosses to another rank: the computation, its send and its receive; the table may lack the last two."""

    made: Action
    send: Action
    receive: Action


@dataclass(frozen=True)
class ScheduleUnderCheck:
    """A schedule, the counts of the pipeline that will run it, and the cell of each single action."""

    schedule: Schedule
    stages: int
    microbatches: int
    training: bool = True
    where: dict[Action, Position] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleUnderCheck:
        """A schedule with its own counts and every action in `where`; for a table known to have each action only once."""
        subject = cls(schedule, schedule.stages, schedule.microbatches)
        subject.where.update((leaf, Position(rank, at)) for rank, at, action in schedule.cells() for leaf in action.leaves)
        return subject

    def at(self, place: Position) -> Action | None:
        return self.schedule.table[place.rank][place.column]

    @cached_property
    def messages(self) -> tuple[Crossing, ...]:
        """Every result that crosses to another rank, in row order. Read it only after `where` is filled."""
        rank_of = self.schedule.rank_of_stage
        pairs = ((leaf, message(leaf, self.stages)) for leaf in self.where)
        return tuple(Crossing(made, *ends) for made, ends in pairs if ends and rank_of[ends[0].stage] != rank_of[ends[1].stage])

    def refusal(self, place: Position, what: str, remedy: str) -> ScheduleError:
        """The error for a fault at `place`, showing up to three cells on either side."""
        row = ["." if cell is None else str(cell) for cell in self.schedule.table[place.rank]]
        row[place.column] = f">>> {row[place.column]} <<<"
        first, end = max(0, place.column - 3), place.column + 4
        window = ["..."] * (first > 0) + row[first:end] + ["..."] * (end < len(row))
        return ScheduleError(
            f"schedule {self.schedule.name!r}, rank {place.rank}, column {place.column}: {what}; {remedy}\n"
            f"    r{place.rank} {' '.join(window)}"
        )

    def check_before(self, first: Action, then: Action) -> None:
        """Raise `ScheduleError` unless `first` is in an earlier column than `then`; both are on one rank."""
        earlier, later = self.where[first], self.where[then]
        if earlier.column >= later.column:
            what = f"{then} needs {first}, which stands in column {earlier.column}"
            raise self.refusal(later, what, f"move {first} before {then}")
