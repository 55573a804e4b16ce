"""The numbers of a pipeline's training steps on this rank: a record for the report page, and `StepMetrics` for hooks.

Contract of the record: fewer than `_MOST` steps are kept; at `_MOST` every second one is dropped, and from then on half as many
are recorded. The losses are the elements of one tensor, whose size doubles. `add` copies a number on the loss's device and
waits for nothing; `view` reads the losses.

Contract of the meter: without hooks a step marks and copies nothing. With hooks the numbers of a step are read when the next
training call begins, so that the host waits only until the device has ended that step.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from graphpp.pipeline.cache_key import StepCall
from graphpp.pipeline.graph_cache import PreparedStep
from graphpp.pipeline.results import StepMetrics
from graphpp.report.run_view import RunView
from graphpp.runtime.recorder import Clock, Recorder, WaitRecorder
from graphpp.schedules.simulate.timeline import Event
from graphpp.streams import to_host

_MOST, _FIRST = 2048, 64
_NOTE = "The time of a step is that from the end of the step before: it includes the optimizer and the loading of data."


class StepRecord:
    """The record of one pipeline on this rank: every `_every`-th step."""

    def __init__(self) -> None:
        self._losses, self._ends = torch.empty(0), list[float]()
        self._steps, self._every = 0, 1

    def add(self, loss: torch.Tensor) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            if len(self._ends) == len(self._losses):
                more = loss.new_empty(len(self._ends) or _FIRST)
                self._losses = torch.cat([self._losses, more]) if self._ends else more
            self._losses[len(self._ends)].copy_(loss.detach())
            self._ends.append(time.perf_counter())
        if len(self._ends) == _MOST:
            self._losses[: _MOST // 2] = self._losses[1:_MOST:2].clone()
            self._ends, self._every = self._ends[1::2], 2 * self._every

    def view(self, losses: Sequence[float] | None = None, seconds: Sequence[float] | None = None) -> RunView:
        """The run so far; `losses`, `seconds`: one per step, in place of the recorded ones."""
        own = self._losses[: len(self._ends)].tolist()
        times = [(end - start) / self._every for start, end in pairwise(self._ends)]
        recorded = RunView.of(own, [nan, *times] if times else (), self._every)
        given = RunView.of(() if losses is None else losses, () if seconds is None else seconds)
        return RunView(
            recorded.losses if losses is None else given.losses,
            recorded.seconds if seconds is None else given.seconds,
            _NOTE if seconds is None else "",
        )


@dataclass
class _Hook:
    call: Callable[[StepMetrics], object]
    every: int
    actions: bool


@dataclass
class _Step:
    """A step whose numbers are not read yet: marks of its begin and end, values on their way to the host."""

    rows: int | None
    prepared: PreparedStep
    recorder: WaitRecorder
    marks: list[Any]
    number: int = 0
    loss: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    peak_bytes: int | None = None


class StepMeter:
    """Measures the training steps of one pipeline that a hook wants, and hands the numbers out."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._hooks = device, OrderedDict[int, _Hook]()
        self._begun: tuple[WaitRecorder, Any] | None = None
        self._running: _Step | None = None
        self._ended: _Step | None = None

    def add(self, call: Callable[[StepMetrics], object], every: int, actions: bool) -> RemovableHandle:
        handle = _Handle(self._hooks, self.hand_out)
        self._hooks[handle.id] = _Hook(call, every, actions)
        return handle

    def begin(self, number: int) -> None:
        """Hand out the numbers of the step before. Called in a round of the ranks, so that an error of a hook reaches all."""
        self._begun = self._running = None
        if not self._hooks:
            return
        self.hand_out()
        wanted = [hook for hook in self._hooks.values() if number % hook.every == 0]
        if wanted:
            actions = any(hook.actions for hook in wanted)
            recorder = (Recorder if actions else WaitRecorder)(Clock(self._device, idle=actions))
            self._begun = recorder, recorder.clock.mark()

    def ran(self, call: StepCall, prepared: PreparedStep) -> WaitRecorder | None:
        """The recorder of a step that is about to run; None: no hook wants the step."""
        if self._begun is None:
            return None
        recorder, mark = self._begun
        rows = [part.rows for part in call.parts]
        self._running = _Step(None if None in rows else sum(filter(None, rows)), prepared, recorder, [mark])
        return recorder

    def end(self, number: int, loss: torch.Tensor) -> None:
        step, self._running = self._running, None
        if step is not None:
            step.number, step.loss = number, to_host(loss.detach(), self._device)
            step.peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
            step.marks.append(step.recorder.clock.mark())
            self._ended = step

    def clipped(self, norm: torch.Tensor) -> None:
        if self._ended is not None:
            self._ended.norm = to_host(norm, self._device)
            self._ended.marks[2:] = [self._ended.recorder.clock.mark()]

    def hand_out(self) -> None:
        """Give the latest step's numbers to the hooks, once."""
        step, self._ended = self._ended, None
        if step is None:
            return
        for hook in [hook for hook in self._hooks.values() if step.number % hook.every == 0]:
            try:
                hook.call(_read(step, hook.actions))
            except Exception as error:
                error.add_note(f"graphpp: raised by the step hook {hook.call!r} with the numbers of step {step.number}")
                raise


def _read(step: _Step, actions: bool) -> StepMetrics:
    assert step.loss is not None, "the step has ended"
    runner, epoch = step.prepared.runner, time.time() - time.perf_counter()
    began, end, *_ = map(step.recorder.clock.seconds, step.marks)
    plan, rank = step.prepared.lowered.graphs[0].plan, runner.place.rank
    known = plan.sharding is not None and plan.schedule.microbatches == runner.schedule.microbatches
    times = step.recorder.times(runner.schedule.stages) if actions and isinstance(step.recorder, Recorder) else ()
    return StepMetrics(
        step=step.number,
        loss=float(step.loss),
        rows=step.rows,
        began=epoch + began,
        seconds=end - began,
        waited=step.recorder.waited(),
        sent_bytes=runner.sent_bytes,
        shard_bytes=plan.sharding.ranks[rank].sent if known and plan.sharding is not None else None,
        grad_norm=None if step.norm is None else float(step.norm),
        peak_bytes=step.peak_bytes,
        actions=tuple(Event(rank, action, epoch + start, epoch + end) for action, start, end in times),
    )


class _Handle(RemovableHandle):
    """Hands out the numbers of the last step before it removes its hook."""

    def __init__(self, hooks: OrderedDict[int, _Hook], hand_out: Callable[[], None]) -> None:
        super().__init__(hooks)
        self._hand_out = hand_out

    def remove(self) -> None:
        try:
            self._hand_out()
        finally:
            super().remove()
