"""Records when a rank's actions ran in one step, by marks around each action and each wait for a message.

A recorder serves one step of one rank; a `WaitRecorder` marks the waits only. A computation that waits for a message gives two
spans: the wait counts as its receive, the rest as the computation. Times are in seconds of `time.perf_counter`. On CUDA the
marks are events of the current stream, read after the step, so the host does not wait for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.schedules.table.actions import Action, message, upstream
from graphpp.streams import timing_event, wait_for_device

ActionFunction = Callable[[], object]  # does one action

_LEADING = 0.05  # a wait is leading (not part of the computation) if at most this fraction of the computation ran before it


class Clock:
    """Marks moments, and tells their times afterwards, in seconds of `time.perf_counter`.

    On the CPU a mark is its own time. On CUDA it is an event of the current stream, after one of an idle device.
    """

    def __init__(self, device: torch.device, *, idle: bool = True) -> None:
        """`idle`: wait until the device is idle, without which on CUDA only differences of times are right."""
        self._device = device
        if idle:
            wait_for_device(device)
        self._origin, self._at = self.mark(), time.perf_counter()

    def mark(self) -> Any:
        return timing_event(self._device) if self._device.type == "cuda" else time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """The time of a mark; waits until the stream has reached it."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._at + float(self._origin.elapsed_time(mark)) / 1e3


@dataclass
class _Span:
    action: Action
    start: Any
    end: Any = None
    waits: list[Any] = field(default_factory=list)  # two marks for each wait: before, after


class WaitRecorder:
    """Marks the waits for messages of one step. `run`: runs an action and marks it; None: actions are not marked."""

    run: Callable[[Action, ActionFunction], None] | None = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._marks: list[Any] = []

    def waiting(self) -> None:
        """Called right before and right after each wait for a message."""
        self._marks.append(self.clock.mark())

    def waited(self) -> float:
        """The seconds of all waits."""
        marks = list(map(self.clock.seconds, self._marks))
        return sum((end - start for start, end in zip(marks[::2], marks[1::2], strict=True)), 0.0)


class Recorder(WaitRecorder):
    """Marks the actions of one step too."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._spans: list[_Span] = []

    def run(self, action: Action, function: ActionFunction) -> None:
        span = _Span(action, self.clock.mark())
        self._spans.append(span)
        function()
        span.end = self.clock.mark()

    def waiting(self) -> None:
        super().waiting()
        if self._spans and self._spans[-1].end is None:
            self._spans[-1].waits.append(self._marks[-1])

    def times(self, stages: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of every action that ran, in table order; `stages`: the pipeline's number of stages."""
        read = self.clock.seconds
        found = {span.action: (read(span.start), read(span.end)) for span in self._spans}
        posted = {leaf: span.action for span in self._spans for leaf in span.action.leaves if leaf.is_communication}
        for span in (span for span in self._spans if span.action.is_compute):
            waits = self._waits(span)
            receives = [posted[each] for leaf in span.action.leaves for each in received_by(leaf, stages) if each in posted]
            found.update(zip(receives, waits, strict=False))
            found[span.action] = _computing(*found[span.action], waits, several=bool(span.action.parts))
        return [(action, *times) for action, times in found.items()]

    def overhead(self) -> float:
        """The seconds per action in which the rank neither computed nor waited for a message."""
        if not self._spans:
            return 0.0
        read = self.clock.seconds
        busy = sum(read(span.end) - read(span.start) for span in self._spans if span.action.is_compute)
        busy += sum(after - before for span in self._spans if not span.action.is_compute for before, after in self._waits(span))
        return max(read(self._spans[-1].end) - read(self._spans[0].start) - busy, 0.0) / len(self._spans)

    def _waits(self, span: _Span) -> list[tuple[float, float]]:
        marks = list(map(self.clock.seconds, span.waits))
        return list(zip(marks[::2], marks[1::2], strict=True))


def _computing(start: float, end: float, waits: Sequence[tuple[float, float]], *, several: bool) -> tuple[float, float]:
    """The span of a computation without its leading waits; an overlap of `several` parts may wait again in its middle."""
    computes = end - start - sum(until - since for since, until in waits)
    for since, until in waits:
        if several and since - start > _LEADING * computes:
            break
        start = until
    return start, end


def received_by(action: Action, stages: int) -> tuple[Action, ...]:
    """The receive whose message an F, B or I reads, if the sending stage is on another rank."""
    makers = upstream(action, stages)
    pair = message(makers[0], stages) if makers else None
    return () if pair is None else (pair[1],)
