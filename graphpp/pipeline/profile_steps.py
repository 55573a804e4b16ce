"""Runs the steps that `Pipeline.profile` times, without a trace in the model.

Contract
--------
- All functions are called by all ranks.
- A schedule has whole backwards (B), split ones (I and W), or both. The kinds that the pipeline's own schedule does not run are
  measured under the same schedule with its backwards split, or merged.
- Each step starts without gradients, and gradients, buffers and random states are restored after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.profile import Profile, RecordedSteps, barrier, profile_of
from graphpp.runtime.model_state import state_restored
from graphpp.runtime.recorder import Recorder, clock_of
from graphpp.schedules.rewrite.merge_backward import merge_backward, without_overlaps
from graphpp.schedules.rewrite.split_backward import split_backward
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True)
class Trials:
    """Runs steps of one pipeline. `prepare` reads the call and agrees on it with all ranks, as at the head of every step; `run`
    does the call once, by the runner of the argument."""

    model: nn.Module
    cache: GraphCache
    prepare: Callable[[], tuple[object, PreparedStep]]
    run: Callable[[PreparedStep], object]

    def profile(self, repeat: int) -> Profile:
        """The profile of the call's runner, from `repeat` steps after one to warm up."""
        heads = []
        for _ in range(repeat):
            began = time.perf_counter()
            _, prepared = self.prepare()
            heads.append(time.perf_counter() - began)
        tables = list(_counterparts(prepared.runner.schedule))
        others = [self._measured(self.cache.under(prepared, table), repeat) for table in tables]
        return profile_of(self._measured(prepared, repeat), others, heads)

    def _measured(self, prepared: PreparedStep, repeat: int) -> RecordedSteps:
        self._step(prepared, None)
        recorders, seconds = [], []
        for _ in range(repeat):
            recorders.append(Recorder(clock_of(prepared.runner.place.device)))
            seconds.append(self._step(prepared, recorders[-1]))
        return RecordedSteps(prepared.runner, recorders, seconds)

    def _step(self, prepared: PreparedStep, recorder: Recorder | None) -> float:
        """The seconds from the call of a step to the end of its work."""
        place = prepared.runner.place
        written = {fqn for graph in prepared.lowered.graphs for fqn in graph.captured.joint.written()}
        with state_restored(self.model, place.device, written):
            barrier(place)  # so that no rank's first wait includes another rank's late start
            with contextlib.nullcontext() if recorder is None else prepared.runner.recording(recorder):
                began = time.perf_counter()
                self.run(prepared)
                prepared.runner.losses()
                if place.device.type == "cuda":
                    torch.cuda.synchronize(place.device)
                return time.perf_counter() - began


def _counterparts(schedule: Schedule) -> Iterator[Schedule]:
    """Tables for the kinds that this schedule does not run, so that together every stage runs F, B, I and W."""
    run = {(action.stage, action.kind) for _, _, action in schedule.cells()}  # parts of overlaps not counted
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    lacking = {kind for kind in kinds if any((stage, kind) not in run for stage in range(schedule.stages))}
    if lacking - {Kind.B}:
        yield split_backward(without_overlaps(schedule))
    if Kind.B in lacking:
        yield merge_backward(schedule)
