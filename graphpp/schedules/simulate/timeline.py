"""When each action of a schedule ran, simulated or measured: one type for both, so that they can be laid side by side.

Contract
    An `Event` is one action on one rank from `start` to `end`; a `Timeline` has all of them, rank by rank in order of
    their starts, and beside them the bytes alive on each rank after each change. Times count from the start of the
    step, in seconds, or in the units of the costs that were simulated. Nothing here knows where they came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True)
class Event:
    """One action on one rank; what stands for a message, its send or its receive, lasts while the rank is held up by it."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """From start to end."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """All events of one step. `memory[rank]` lists (time, live bytes), each pair holding until the next one."""

    schedule: Schedule
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    name: str = "simulated"
    unit: str = "s"

    @cached_property
    def makespan(self) -> float:
        """When the last event ends."""
        return max((event.end for event in self.events), default=0.0)

    def on(self, rank: int) -> tuple[Event, ...]:
        """The events of one rank, in order of their starts."""
        return tuple(event for event in self.events if event.rank == rank)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(event.duration for event in self.on(rank) if event.action.is_compute)

    def bubble(self, rank: int) -> float:
        """The share of the makespan in which a rank does not compute, 0 to 1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive on a rank at any time; 0 where memory was not followed."""
        return max((count for _, count in self.memory[rank]), default=0) if self.memory else 0
