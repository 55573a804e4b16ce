"""torch's pipeline runtime, with a loop over functions that were bound to the actions before the step.

`ActionLoop` is a `_PipelineScheduleRuntime` whose `pipeline_order_with_comms` is the schedule's table in torch's notation;
`run` executes this rank's row once. This file imports Dynamo (about a second), so the runner imports it late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from torch.autograd.profiler import record_function

from graphpp._torch.pipelining import ComputationType, PipelineScheduleRuntime, TorchAction, profiler_enabled
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
        self._row = [(action, f"PP:{to_torch(action)}", function) for action, function in row]

    def run(self, watch: ActionWatcher | None = None) -> None:
        """Run this rank's actions once; with `watch`, call `watch(action, function)` in place of each function."""
        self._step_microbatches(watch)

    def _step_microbatches(self, watch: ActionWatcher | None = None) -> None:  # type: ignore[override]
        """Run the row. Under a profiler (`torch.profiler`, `emit_nvtx`) each action is a range with torch's name for it."""
        named = profiler_enabled()
        for action, name, function in self._row:
            with record_function(name) if named else _UNNAMED:
                if watch is None:
                    function()
                else:
                    watch(action, function)
