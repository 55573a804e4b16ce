"""When each action of a schedule ran, simulated or measured: one type for both, so that they can be compared."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from typing import NamedTuple, TypeVar, overload

from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.schedule import Schedule

T = TypeVar("T")
Curve = tuple[tuple[float, int], ...]
"""(time, live bytes) on a rank, each pair valid until the next one."""


class Event(NamedTuple):  # a step may have millions
    """One action on one rank; the event of a send or a receive lasts as long as the message occupies the rank."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class MadeWhenRead(Sequence[T]):
    """A tuple whose items are made when they are read. A subclass has `__len__` and `_item`."""

    @abstractmethod
    def _item(self, at: int) -> T:
        """Of an index from 0 to the length."""

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        places = range(len(self))[at]
        return self._item(places) if isinstance(places, int) else tuple(map(self._item, places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | MadeWhenRead) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class EventRow(NamedTuple):
    """The events of one rank, as columns."""

    actions: Sequence[Action]
    starts: Sequence[float]
    ends: Sequence[float]

    def by_start(self) -> EventRow:
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        actions, starts, ends = self
        return EventRow([actions[at] for at in order], [starts[at] for at in order], [ends[at] for at in order])


class EventColumns(MadeWhenRead[Event]):
    """The events of all ranks, rank by rank by start."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        self.rows = [row if list(row.starts) == sorted(row.starts) else row.by_start() for row in rows]
        self._firsts = list(accumulate((len(row.starts) for row in self.rows), initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def _item(self, at: int) -> Event:
        rank = bisect_right(self._firsts, at) - 1
        (actions, starts, ends), at = self.rows[rank], at - self._firsts[rank]
        return Event(rank, actions[at], starts[at], ends[at])

    def __iter__(self) -> Iterator[Event]:
        for rank in range(len(self.rows)):
            yield from self.on(rank)

    def on(self, rank: int) -> Iterator[Event]:
        return map(Event, repeat(rank), *self.rows[rank])


@dataclass(frozen=True)
class Timeline:
    """The events of one step, rank by rank by start; times count from the start of the step.

    `memory[rank]` lists (time, live bytes), each pair valid until the next one; the curve of a simulated step is computed when
    it is first read. `unit`: "s", or the costs' unit.
    """

    schedule: Schedule
    events: Sequence[Event]
    memory: Sequence[Curve] = ()
    name: str = "simulated"
    unit: str = "s"

    @cached_property
    def makespan(self) -> float:
        if isinstance(self.events, EventColumns):
            return max((max(row.ends) for row in self.events.rows if row.ends), default=0.0)
        return max((event.end for event in self.events), default=0.0)

    def on(self, rank: int) -> tuple[Event, ...]:
        """The events of one rank, in order of their starts."""
        return events_on(rank, self.events)

    def busy(self, rank: int) -> float:
        """The time for which a rank computes."""
        return sum(event.duration for event in self.on(rank) if event.action.is_compute)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which a rank does not compute, 0 to 1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive on a rank at any time; 0 if the timeline has no memory curves."""
        return max((count for _, count in self.memory[rank]), default=0) if self.memory else 0


def events_on(rank: int, events: Sequence[Event]) -> tuple[Event, ...]:
    """The events of one rank, in the order given."""
    return tuple(events.on(rank) if isinstance(events, EventColumns) else (each for each in events if each.rank == rank))


def stages_of_ranks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    homes = schedule.rank_of_stage
    return tuple(tuple(sorted(stage for stage in homes if homes[stage] == rank)) for rank in range(schedule.ranks))
