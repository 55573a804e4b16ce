"""Timelines in the trace format that chrome://tracing and Perfetto load (Chromium's "Trace Event Format").

JSON with `traceEvents`: one complete event ("X") per event of a timeline, named as its action, in microseconds (1000 for a unit
other than seconds); a process per rank of each timeline, with a thread for computation and one for communication; a counter
("C") with the bytes alive on each rank, if the timeline has memory curves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graphpp.arguments import checked, or_none
from graphpp.errors import ScheduleError
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

_COMPUTE, _COMMUNICATION = 0, 1
_THREADS = {_COMPUTE: "compute", _COMMUNICATION: "communication"}


@checked(ScheduleError, costs=or_none(COSTS))
def chrome_trace(*drawn: Schedule | Timeline, costs: Costs | None = None) -> str:
    """The events as JSON for chrome://tracing and Perfetto, a process per rank; arguments and errors as for `graphpp.svg`."""
    timelines = timelines_of(drawn, costs)
    events: list[dict[str, Any]] = []
    for index, timeline in enumerate(timelines):
        first = 1 + sum(each.schedule.ranks for each in timelines[:index])
        events += _names(timeline, first, several=len(timelines) > 1)
        events += (_complete(event, first, _microseconds(timeline)) for event in timeline.events)
        events += _memory(timeline, first)
    about = [{"schedule": each.schedule.name, "timeline": each.name, "unit": each.unit} for each in timelines]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"timelines": json.dumps(about)}})


def _microseconds(timeline: Timeline) -> float:
    return 1e6 if timeline.unit == "s" else 1e3


def _names(timeline: Timeline, first: int, several: bool) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.schedule.ranks):
        label = f"{timeline.name}, rank {rank}" if several else f"rank {rank}"
        yield {"ph": "M", "name": "process_name", "pid": first + rank, "tid": 0, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": first + rank, "tid": 0, "args": {"sort_index": first + rank}}
        for thread, name in _THREADS.items():
            yield {"ph": "M", "name": "thread_name", "pid": first + rank, "tid": thread, "args": {"name": name}}


def _complete(event: Event, first: int, factor: float) -> dict[str, Any]:
    action = event.action
    parts = [{"stage": leaf.stage, "kind": leaf.kind.value, "microbatch": leaf.microbatch} for leaf in action.leaves]
    return {
        "ph": "X", "name": str(action), "cat": action.kind.value,
        "pid": first + event.rank, "tid": _COMPUTE if action.is_compute else _COMMUNICATION,
        "ts": event.start * factor, "dur": event.duration * factor,
        "args": parts[0] if len(parts) == 1 else {"parts": parts},
    }  # fmt: skip


def _memory(timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    factor = _microseconds(timeline)
    for rank, points in enumerate(timeline.memory):
        for time, count in points:
            yield {"ph": "C", "name": "bytes alive", "pid": first + rank, "ts": time * factor, "args": {"bytes": count}}
