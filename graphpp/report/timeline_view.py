"""A timeline as boxes of a chart.

Contract
    in   a `Timeline`, simulated or measured
    out  `TimelineView`: a box for each part of a computation, and for each send, receive and collective that takes time. Beyond
         `_MOST_MESSAGES` of these, only the longest get boxes, and `left_out` counts the rest
    Boxes are sorted by rank, then by start. Raises `GraphPPError` for a timeline without events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from graphpp.errors import GraphPPError
from graphpp.schedules.simulate.timeline import Event, Timeline, stages_of_ranks
from graphpp.schedules.table.actions import SENDS, Action

KINDS = ("F", "B", "I", "W", "R", "send", "receive", "collective")
"""The kinds of boxes; `Box.kind` is an index into it."""

_MOST_MESSAGES = 60_000


class Box(NamedTuple):
    """One box. `lane`: index of a part in its overlapped action, of `lanes`; `chunk`: index of the stage on its rank;
    `microbatch`: -1 for collectives and for batches of messages."""

    rank: int
    kind: int
    stage: int
    microbatch: int
    chunk: int
    lane: int
    lanes: int
    start: float
    duration: float


@dataclass(frozen=True)
class RankLine:
    """One rank: its `stages`, the time it computes, and the share of the step in which it is idle."""

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float


@dataclass(frozen=True)
class TimelineView:
    """`name`: "simulated" or "measured"; `note`: a sentence about the times; `unit`: of all times, "s" for seconds; `whole`:
    whether all microbatches of the step are there."""

    name: str
    schedule: str
    unit: str
    makespan: float
    stages: int
    microbatches: int
    ranks: tuple[RankLine, ...]
    boxes: tuple[Box, ...] = field(repr=False)
    left_out: int = 0
    note: str = ""
    whole: bool = True

    @classmethod
    def of(cls, timeline: Timeline, note: str = "", whole: bool = True) -> TimelineView:
        if not timeline.events:
            raise GraphPPError(f"the timeline {timeline.name!r} of {timeline.schedule.name!r} has no events: leave it out")
        homes = stages_of_ranks(timeline.schedule)
        chunks = {stage: chunk for stages in homes for chunk, stage in enumerate(stages)}
        others = [event for event in timeline.events if not event.action.is_compute and event.duration > 0]
        shown = nlargest(_MOST_MESSAGES, others, key=lambda event: event.duration) if len(others) > _MOST_MESSAGES else others
        computations = [event for event in timeline.events if event.action.is_compute]
        boxes = sorted(_boxes((*computations, *shown), chunks), key=lambda box: (box.rank, box.start))
        table, span = timeline.schedule, timeline.makespan
        lines, left_out = tuple(_lines(homes, computations, span)), len(others) - len(shown)
        head = timeline.name, table.name, timeline.unit, span, table.stages, table.microbatches
        return cls(*head, lines, tuple(boxes), left_out, note, whole)

    @property
    def idle(self) -> float:
        """The mean idle share of the ranks, 0 to 1."""
        return sum(each.idle for each in self.ranks) / len(self.ranks)


def _lines(homes: Sequence[tuple[int, ...]], computations: Sequence[Event], span: float) -> Iterable[RankLine]:
    busy = [0.0] * len(homes)
    for event in computations:
        busy[event.rank] += event.duration
    return (RankLine(rank, own, busy[rank], 1 - busy[rank] / span if span else 0.0) for rank, own in enumerate(homes))


def _boxes(events: Iterable[Event], chunks: dict[int, int]) -> Iterable[Box]:
    for event in events:
        leaves = event.action.leaves if event.action.is_compute else (event.action,)
        for lane, leaf in enumerate(leaves):
            stage = leaf.leaves[0].stage
            numbers = stage, -1 if leaf.microbatch is None else leaf.microbatch
            place = chunks.get(stage, 0), lane, len(leaves)
            yield Box(event.rank, _kind(leaf), *numbers, *place, event.start, event.duration)


def _kind(leaf: Action) -> int:
    if leaf.is_compute:
        return KINDS.index(leaf.kind.value)
    if not leaf.is_communication:
        return KINDS.index("collective")
    return KINDS.index("send" if all(part.kind in SENDS for part in leaf.leaves) else "receive")
