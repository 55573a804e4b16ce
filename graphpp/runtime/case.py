"""A schedule under examination: what it must fit, where each of its actions stands, and how a fault is shown.

Contract
    `where` maps every single action to its cell, an overlapped one to the cell of its whole; the first step of
    `graphpp.runtime.checker` fills it, and every later step, `graphpp.runtime.deadlock` too, reads it.
    Ranks and columns in messages count from 0, like the rows and cells of the printed table without its labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.runtime.actions import Action, message
from graphpp.runtime.schedule import Schedule


class Place(NamedTuple):
    """A cell of the table."""

    rank: int
    column: int


@dataclass(frozen=True)
class Case:
    """A schedule, the counts of the pipeline that is to run it, and where each single action stands."""

    schedule: Schedule
    stages: int
    microbatches: int
    where: dict[Action, Place] = field(default_factory=dict)

    def at(self, place: Place) -> Action | None:
        """What stands in a cell; None where the rank is idle."""
        return self.schedule.table[place.rank][place.column]

    def messages(self) -> Iterator[tuple[Action, Action, Action]]:
        """(computation, send, receive) wherever a result goes to another rank; the two may be missing in the table."""
        rank_of = self.schedule.rank_of_stage
        for leaf in self.where:
            pair = message(leaf, self.stages)
            if pair and rank_of[pair[0].stage] != rank_of[pair[1].stage]:
                yield leaf, *pair

    def refusal(self, place: Place, what: str, remedy: str) -> ScheduleError:
        """The error for a fault at `place`, showing up to three cells on either side."""
        row = ["." if cell is None else str(cell) for cell in self.schedule.table[place.rank]]
        row[place.column] = f">>> {row[place.column]} <<<"
        first, end = max(0, place.column - 3), place.column + 4
        window = ["..."] * (first > 0) + row[first:end] + ["..."] * (end < len(row))
        return ScheduleError(
            f"schedule {self.schedule.name!r}, rank {place.rank}, column {place.column}: {what}; {remedy}\n"
            f"    r{place.rank} {' '.join(window)}"
        )
