"""torch's pipeline runtime, with a loop over functions that were bound to the actions before the step.

`ActionLoop` is a `_PipelineScheduleRuntime` whose `pipeline_order_with_comms` is the schedule's table in torch's notation;
`run` executes this rank's row once. This file imports Dynamo (about a second), so the runner imports it late.

Under `torch.autograd.detect_anomaly` the loop notes the first operator of a backward that gives NaN, else the first gradient
with NaN: operators inside of compiled regions are not seen. The step goes on, because other ranks wait for its messages.
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
from graphpp._torch.autograd import finds_nan, profiler_enabled
from graphpp._torch.pipelining import ComputationType, PipelineScheduleRuntime, TorchAction
from graphpp.runtime.recorder import ActionFunction
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule

ActionWatcher = Callable[[Action, ActionFunction], None]

_UNNAMED = contextlib.nullcontext()


def to_torch(action: Action) -> TorchAction:
    """The action in torch's own type. P2P becomes OVERLAP_F_B, torch's only kind with parts; R, which is a forward again, F."""
    parts = tuple(map(to_torch, action.parts)) or None
    return TorchAction(action.stage, _type(action.kind), action.microbatch, parts)


@cache  # a table of 64 ranks and 512 microbatches has 390,000 actions
def _type(kind: Kind) -> ComputationType:
    return ComputationType({Kind.P2P: Kind.OVERLAP_F_B, Kind.R: Kind.F}.get(kind, kind).value)


class ActionLoop(PipelineScheduleRuntime):
    def __init__(self, stages: Sequence[Any], schedule: Schedule, row: Iterable[tuple[Action, ActionFunction]]) -> None:
        super().__init__(list(stages), schedule.microbatches, backward_requires_autograd=False)  # type: ignore[no-untyped-call]
        self.stage_index_to_group_rank = dict(schedule.rank_of_stage)
        ours = {rank: [action for action in row if action is not None] for rank, row in enumerate(schedule.table)}
        self.pipeline_order_with_comms = {rank: list(map(to_torch, row)) for rank, row in ours.items()}
        self._sums = {stage.stage_index: stage.gradients for stage in stages}
        self._row = [(action, f"PP:{to_torch(action) if action.parts else action}", function) for action, function in row]
        self.anomaly = ""  # the first NaN of the last step's backward; empty for none, and outside of torch's anomaly mode

    def run(self, watch: ActionWatcher | None = None) -> None:
        """Run this rank's actions once; with `watch`, call `watch(action, function)` in place of each function."""
        self.anomaly = ""
        self._step_microbatches(watch or (self._finding_nan if finds_nan() else None))

    def _finding_nan(self, action: Action, function: ActionFunction) -> None:
        backward = [leaf for leaf in action.leaves if leaf.kind in (Kind.B, Kind.I, Kind.W)]
        finder = _NanFinder() if backward and not self.anomaly else _UNNAMED  # type: ignore[no-untyped-call]
        with finder:
            function()
        if isinstance(finder, _NanFinder):
            sums = (item for leaf in backward for item in self._sums[leaf.stage].sums.items())
            found = finder.found or next((f"the gradient of {fqn} has NaN" for fqn, total in sums if _has_nan(total)), "")
            self.anomaly = found and f"in {action} {found}"

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
    """Notes the first operator that gives NaN, and its line in the program's text."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found and any(map(_has_nan, pytree.tree_flatten(result)[0])):
            line = _line_of_program()
            if not {"recomputed", "forward", "forward,"} & {*line.partition(" in ")[0].split()}:  # these are of the forward
                self.found = f"{func} gives NaN, {line}"
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
