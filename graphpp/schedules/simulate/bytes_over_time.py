"""The bytes alive on each rank over the time of a simulated step, by kind: weights, gradients, optimizer, activations.

Contract
    in   the timeline that `simulate` made of a table, the costs and the state of `check/step_memory.py`
    out  for each rank (time, bytes by kind), each pair valid until the next one. The highest sum is the rank's `StepPeak`
    Bytes change in the order of the row. The action of a row that overlaps a later one (a gather, a reduction) changes them at
    its place in the row, and no earlier than the action before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphpp.schedules.check.peak_memory import MicrobatchCosts
from graphpp.schedules.check.step_memory import step_bytes
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row
from graphpp.schedules.table.state_bytes import HeldBytes

KindCurve = tuple[tuple[float, Mapping[str, int]], ...]


def bytes_over_time(
    timeline: Timeline,
    costs: MicrobatchCosts,
    held: Sequence[HeldBytes] = (),
    offloaded: Sequence[OffloadWindow] = (),
) -> tuple[KindCurve, ...]:
    """The curve of each rank. Raises `ScheduleError` as `step_peaks` does."""
    table = timeline.schedule
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in table.table]
    for event in timeline.events:
        spans[event.rank][event.action] = event.start, event.end
    states = step_bytes(table, costs, held, offloaded)
    return tuple(
        tuple(_timed(row, state, own, timeline.makespan)) for row, state, own in zip(table.table, states, spans, strict=True)
    )


def _timed(
    row: Row, states: Iterator[tuple[int, dict[str, int]]], spans: Mapping[Action, tuple[float, float]], end: float
) -> Iterator[tuple[float, Mapping[str, int]]]:
    """The start of the step, two moments for each action of the row (its start and its end), and the end of the step."""
    now = 0.0
    yield now, next(states)[1]
    for action in row:
        span = spans.get(action) if action is not None else None
        for side in (0, 1):
            _, parts = next(states)
            if span is not None:
                now = max(now, span[side])
                yield now, parts
    yield end, next(states)[1]
