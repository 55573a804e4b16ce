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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """Runs steps of one pipeline; `run` does the measured call once, by the runner of the argument."""

    model: nn.Module
    cache: GraphCache
    run: Callable[[PreparedStep], object]

    def profile(self, prepared: PreparedStep, repeat: int) -> Profile:
        """The profile of `prepared`'s runner, from `repeat` steps after one to warm up."""
        tables = list(_counterparts(prepared.runner.schedule))
        others = [self._measured(self.cache.under(prepared, table), repeat) for table in tables]
        return profile_of(self._measured(prepared, repeat), others)

    def _measured(self, prepared: PreparedStep, repeat: int) -> RecordedSteps:
        self._step(prepared, None)
        recorders = []
        for _ in range(repeat):
            recorders.append(Recorder(clock_of(prepared.runner.place.device)))
            self._step(prepared, recorders[-1])
        return RecordedSteps(prepared.runner, recorders)

    def _step(self, prepared: PreparedStep, recorder: Recorder | None) -> None:
        place = prepared.runner.place
        written = {fqn for graph in prepared.lowered.graphs for fqn in graph.captured.joint.written()}
        with state_restored(self.model, place.device, written):
            barrier(place)  # so that no rank's first wait includes another rank's late start
            with contextlib.nullcontext() if recorder is None else prepared.runner.recording(recorder):
                self.run(prepared)


def _counterparts(schedule: Schedule) -> Iterator[Schedule]:
    """Tables for the kinds that this schedule does not run, so that together every stage runs F, B, I and W."""
    run = {(action.stage, action.kind) for _, _, action in schedule.cells()}  # parts of overlaps not counted
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    lacking = {kind for kind in kinds if any((stage, kind) not in run for stage in range(schedule.stages))}
    if lacking - {Kind.B}:
        yield split_backward(without_overlaps(schedule))
    if Kind.B in lacking:
        yield merge_backward(schedule)
