"""The pipeline chart as data: the rectangles of each event of a timeline, before any file format.

A `Rect` spans `start` to `end` in the timeline's own time, and `top` to `bottom` (0 to 1) of its rank's row. Computations and
the idle time between them fill a rank's row exactly, from 0 to the makespan. The parts of an overlap lie one above the other in
the box of their action. Sends, receives and collectives that occupy their rank are a strip at the foot of the row, over the
other rectangles; events that take no time are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphpp.schedules.simulate.timeline import Event, Timeline, stages_of_ranks
from graphpp.schedules.table.actions import Action

STRIP = 0.8  # top of the strip of messages


@dataclass(frozen=True)
class Rect:
    """Part of a rank's row; `part` and `event` are None for idle time.

    `chunk`: the position of the stage among the rank's stages.
    """

    rank: int
    start: float
    end: float
    top: float = 0.0
    bottom: float = 1.0
    part: Action | None = None
    event: Event | None = None
    chunk: int = 0


@dataclass(frozen=True)
class Chart:
    """All rectangles of one timeline, in the order in which they are painted."""

    computations: tuple[Rect, ...]
    idle: tuple[Rect, ...]
    messages: tuple[Rect, ...]
    stages_of_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, timeline: Timeline) -> Chart:
        stages = stages_of_ranks(timeline.schedule)
        chunks = {stage: chunk for row in stages for chunk, stage in enumerate(row)}
        by_rank: list[list[Event]] = [[] for _ in stages]
        for event in timeline.events:
            by_rank[event.rank].append(event)
        computations = [rect for event in timeline.events if event.action.is_compute for rect in _parts(event, chunks)]
        idle = [rect for rank, events in enumerate(by_rank) for rect in _idle(rank, events, timeline.makespan)]
        others = (event for event in timeline.events if not event.action.is_compute and event.duration > 0)
        messages = [_strip(event, chunks) for event in others]
        return cls(tuple(computations), tuple(idle), tuple(messages), stages)


def _parts(event: Event, chunks: Mapping[int, int]) -> Iterator[Rect]:
    leaves = event.action.leaves
    for place, leaf in enumerate(leaves):
        top, bottom = place / len(leaves), (place + 1) / len(leaves)
        yield Rect(event.rank, event.start, event.end, top, bottom, leaf, event, chunks[leaf.stage])


def _idle(rank: int, events: Sequence[Event], makespan: float) -> Iterator[Rect]:
    since = 0.0
    for event in sorted((event for event in events if event.action.is_compute), key=lambda event: event.start):
        if event.start > since:
            yield Rect(rank, since, event.start)
        since = max(since, event.end)
    if makespan > since:
        yield Rect(rank, since, makespan)


def _strip(event: Event, chunks: Mapping[int, int]) -> Rect:
    chunk = chunks[event.action.leaves[0].stage]
    return Rect(event.rank, event.start, event.end, STRIP, 1.0, event.action, event, chunk)
