"""The bytes alive on each rank over the time of a step, by kind: weights, gradients, optimizer, messages, activations.

A curve is (time, bytes by kind), each pair valid until the next one; the highest sum is the rank's `StepPeak`. Events may be
simulated or measured. Bytes change in row order: those of a receive, a gather or a reduction that a later computation overlaps
change before that computation starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import TypeVar

from graphpp.schedules.check.step_memory import MicrobatchCosts, step_bytes, step_totals
from graphpp.schedules.simulate.timeline import Curve, Event, MadeWhenRead, Timeline, events_on
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row, Schedule
from graphpp.schedules.table.state_bytes import HeldBytes

T = TypeVar("T")
Spans = Mapping[Action | None, deque[tuple[float, float]]]  # start and end of each time at which an action runs, in order
KindCurve = tuple[tuple[float, Mapping[str, int]], ...]


def bytes_over_time(
    timeline: Timeline,
    costs: MicrobatchCosts,
    held: Sequence[HeldBytes] = (),
    offloaded: Sequence[OffloadWindow] = (),
) -> tuple[KindCurve, ...]:
    """The curve of each rank. Raises `ScheduleError` as `step_peaks` does."""
    table = timeline.schedule
    states = step_bytes(table, costs, held, offloaded)
    ranks = ((table.table[rank], (parts for _, parts in state), _spans(timeline.on(rank))) for rank, state in enumerate(states))
    return tuple(tuple(_timed(row, state, spans, timeline.makespan)) for row, state, spans in ranks)


class MemoryCurves(MadeWhenRead[Curve]):
    """The bytes of activations and messages on each rank, at the times at which they change."""

    def __init__(self, table: Schedule, events: Sequence[Event], costs: Costs) -> None:
        self._table, self._events, self._costs = table, events, costs
        self._found: dict[int, Curve] = {}

    def __len__(self) -> int:
        return self._table.ranks

    def _item(self, rank: int) -> Curve:
        if rank not in self._found:
            totals = iter(step_totals(self._table, rank, self._costs))
            own = _spans(events_on(rank, self._events))
            self._found[rank] = tuple(_changes(_timed(self._table.table[rank], totals, own)))
        return self._found[rank]


def _spans(events: Iterable[Event]) -> Spans:
    """Of one rank's events."""
    spans: dict[Action | None, deque[tuple[float, float]]] = defaultdict(deque)
    for event in sorted(events, key=lambda each: each.start):
        spans[event.action].append((event.start, event.end))
    return spans


def _timed(row: Row, states: Iterator[T], spans: Spans, end: float | None = None) -> Iterator[tuple[float, T]]:
    """The start of the step, the start and end of each action of the row, and the end of the step."""
    times = [left.popleft() if (left := spans.get(action)) else None for action in row]
    computed = [span[0] if span and action and action.is_compute else inf for action, span in zip(row, times, strict=True)]
    following = [*accumulate(reversed(computed[1:]), min, initial=inf)][::-1]
    now = 0.0
    yield now, next(states)
    for span, latest in zip(times, following, strict=False):
        late = span is not None and span[0] > latest  # the wait for a message whose receive was posted here
        for side in (0, 1):
            state = next(states)
            if span is not None:
                now = now if late else max(now, min(span[side], latest))
                yield now, state
    if end is not None:
        yield end, next(states)


def _changes(curve: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    before: int | None = None
    for time, nbytes in curve:
        if nbytes != before:
            yield time, nbytes
        before = nbytes
