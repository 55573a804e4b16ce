"""Runs the steps that `Pipeline.profile` times; the model is unchanged afterwards.

Contract: all ranks call every function. Kinds of backward (B, or I and W) that the pipeline's schedule does not run are
measured under the same schedule with split or merged backwards. Each step starts without gradients; gradients, buffers and
random states are restored after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.profile import Profile, RecordedSteps, barrier, profile_of
from graphpp.runtime.model_state import state_restored
from graphpp.runtime.recorder import Clock, Recorder
from graphpp.schedules.rewrite.recompute import with_recompute, without_recompute
from graphpp.schedules.rewrite.split_backward import merge_backward, split_backward, without_overlaps
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.recompute_marks import Pairs
from graphpp.schedules.table.schedule import Schedule
from graphpp.streams import wait_for_device

Step = Callable[[Recorder | None], object]  # does a call once, with a recorder of its actions


@dataclass(frozen=True)
class Trials:
    """Runs steps of one pipeline: `step` makes the same call as `Pipeline.step`, `run` runs the table of another runner."""

    model: nn.Module
    cache: GraphCache
    step: Step
    run: Callable[[PreparedStep, Recorder | None], object]

    def profile(self, prepared: PreparedStep, repeat: int) -> Profile:
        stages = prepared.lowered.table.recomputed_stages(self.cache.recomputes)
        pairs = frozenset((stage, microbatch) for microbatch, each in enumerate(stages) for stage in each)
        if self.cache.offloads:  # beside an R nothing is offloaded
            pairs = frozenset()
        tables = _counterparts(prepared.runner.schedule, pairs)
        runners = [self.cache.under(prepared, table) for table in tables]
        others = [self._measured(other, partial(self.run, other), repeat) for other in runners]
        return profile_of(self._measured(prepared, self.step, repeat), others)

    def _measured(self, prepared: PreparedStep, step: Step, repeat: int) -> RecordedSteps:
        self._seconds(prepared, step, None)
        recorders = [Recorder(Clock(prepared.runner.place.device)) for _ in range(repeat)]
        seconds = [self._seconds(prepared, step, recorder) for recorder in recorders]
        return RecordedSteps(prepared.runner, recorders, seconds)

    def _seconds(self, prepared: PreparedStep, step: Step, recorder: Recorder | None) -> float:
        place = prepared.runner.place
        written = {fqn for graph in prepared.lowered.graphs for fqn in graph.captured.joint.written()}
        with state_restored(self.model, place.device, written):
            barrier(place)  # so that no rank's first wait includes another rank's late start
            began = time.perf_counter()
            step(recorder)
            wait_for_device(place.device)
            return time.perf_counter() - began


def _counterparts(schedule: Schedule, recomputed: Pairs) -> Iterator[Schedule]:
    """Tables that run the kinds missing from this schedule, so that every stage runs F, B, I and W in one of the tables.

    So do stages that recompute in some pairs, with an R and without.
    """
    split = list(_of_kinds(schedule))
    yield from split
    recomputing = {stage for stage, _ in recomputed}
    for table in (schedule, *split):
        ahead = {stage for stage, _ in table.recomputed_ahead}
        if recomputing - ahead:
            yield with_recompute(table, recomputed)
        if ahead:
            yield without_recompute(table, recomputed)


def _of_kinds(schedule: Schedule) -> Iterator[Schedule]:
    run = {(action.stage, action.kind) for _, _, action in schedule.cells()}  # parts of overlaps not counted
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    lacking = {kind for kind in kinds if any((stage, kind) not in run for stage in range(schedule.stages))}
    if lacking - {Kind.B}:
        yield split_backward(without_overlaps(schedule))
    if Kind.B in lacking:
        yield merge_backward(schedule)
