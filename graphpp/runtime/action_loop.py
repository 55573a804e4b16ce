"""torch's pipeline runtime, with a loop over functions that were bound to the actions before the step.

`ActionLoop` is a `_PipelineScheduleRuntime` whose `pipeline_order_with_comms` is the schedule's table in torch's notation;
`run` executes this rank's row once. This file imports Dynamo (about a second), so the runner imports it late.

Under torch's anomaly mode (`torch.autograd.detect_anomaly`) a step raises `GraphPPError` at the first operator of a backward
that gives NaN, or after the first backward whose gradients have NaN: operators inside of compiled regions are not seen.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.profiler import record_function

from graphpp._torch import pytree
from graphpp._torch.aot import DispatchMode, rounds
from graphpp._torch.pipelining import ComputationType, PipelineScheduleRuntime, TorchAction, profiler_enabled
from graphpp.errors import GraphPPError
from graphpp.runtime.recorder import ActionFunction
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule

ActionWatcher = Callable[[Action, ActionFunction], None]

_UNNAMED = contextlib.nullcontext()


def to_torch(action: Action) -> TorchAction:
    """The action in torch's own type. P2P becomes OVERLAP_F_B, torch's only kind with parts."""
    parts = tuple(map(to_torch, action.parts)) or None
    return TorchAction(action.stage, _type(action.kind), action.microbatch, parts)


@cache  # a table of 64 ranks and 512 microbatches has 390,000 actions
def _type(kind: Kind) -> ComputationType:
    return ComputationType((Kind.OVERLAP_F_B if kind is Kind.P2P else kind).value)


class ActionLoop(PipelineScheduleRuntime):
    def __init__(self, stages: Sequence[Any], schedule: Schedule, row: Iterable[tuple[Action, ActionFunction]]) -> None:
        super().__init__(list(stages), schedule.microbatches, backward_requires_autograd=False)  # type: ignore[no-untyped-call]
        self.stage_index_to_group_rank = dict(schedule.rank_of_stage)
        ours = {rank: [action for action in row if action is not None] for rank, row in enumerate(schedule.table)}
        self.pipeline_order_with_comms = {rank: list(map(to_torch, row)) for rank, row in ours.items()}
        self._sums = {stage.stage_index: stage.gradients for stage in stages}
        self._row = [(action, f"PP:{to_torch(action)}", function) for action, function in row]

    def run(self, watch: ActionWatcher | None = None) -> None:
        """Run this rank's actions once; with `watch`, call `watch(action, function)` in place of each function."""
        anomaly = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        self._step_microbatches(watch or (self._without_nan if anomaly else None))

    def _without_nan(self, action: Action, function: ActionFunction) -> None:
        backward = [leaf for leaf in action.leaves if leaf.kind in (Kind.B, Kind.I, Kind.W)]
        with _NanFinder(action) if backward else contextlib.nullcontext():
            function()
        for leaf in backward:
            for fqn, total in self._sums[leaf.stage].sums.items():
                if _has_nan(total):
                    raise _anomaly(action, f"the gradient of {fqn} has NaN")

    def _step_microbatches(self, watch: ActionWatcher | None = None) -> None:  # type: ignore[override]
        """Run the row. Under a profiler (`torch.profiler`, `emit_nvtx`) each action is a range with torch's name for it."""
        named = profiler_enabled()
        for action, name, function in self._row:
            with record_function(name) if named else _UNNAMED:
                if watch is None:
                    function()
                else:
                    watch(action, function)


class _NanFinder(DispatchMode):
    """Raises `GraphPPError` at the first operator that gives NaN, and names its line in the program's text."""

    def __init__(self, action: Action) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._action = action

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(map(_has_nan, pytree.tree_flatten(result)[0])):
            line = _line_of_program()
            if not {"recomputed", "forward", "forward,"} & {*line.partition(" in ")[0].split()}:  # these are of the forward
                raise _anomaly(self._action, f"{func} gives NaN, {line}")
        return result


def _has_nan(value: Any) -> bool:
    """Whether a value is a tensor with NaN. False while a CUDA graph is recorded, where no value can be read."""
    return rounds(value) and not (value.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(value.isnan().any())


def _line_of_program() -> str:
    """The comment of the running program's line: dtype, shape, module call, source line."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith("<graphpp "):
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("# ")[2].strip()


def _anomaly(action: Action, what: str) -> GraphPPError:
    return GraphPPError(
        f"torch.autograd.detect_anomaly: in {action} {what}. graphpp.verify names the first value with NaN, of the forward too"
    )
