"""When each action of a schedule ran, simulated or measured: one type for both, so that they can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True)
class Event:
    """One action on one rank; the event of a send or a receive lasts as long as the message occupies the rank."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of one step, rank by rank by start; times count from the start of the step.

    `memory[rank]` lists (time, live bytes), each pair valid until the next one. `unit`: "s", or the costs' unit.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    name: str = "simulated"
    unit: str = "s"

    @cached_property
    def makespan(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def on(self, rank: int) -> tuple[Event, ...]:
        """The events of one rank, in order of their starts."""
        return tuple(event for event in self.events if event.rank == rank)

    def busy(self, rank: int) -> float:
        """The time for which a rank computes."""
        return sum(event.duration for event in self.on(rank) if event.action.is_compute)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which a rank does not compute, 0 to 1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive on a rank at any time; 0 if the timeline has no memory curves."""
        return max((count for _, count in self.memory[rank]), default=0) if self.memory else 0


def stages_of_ranks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    homes = schedule.rank_of_stage
    return tuple(tuple(sorted(stage for stage in homes if homes[stage] == rank)) for rank in range(schedule.ranks))
