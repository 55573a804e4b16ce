"""The private names of torch that the runtime stands on; no other file of `runtime/` touches one.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch.distributed.pipelining.schedules._PipelineScheduleRuntime`: holds a rank's actions and walks them in
  `_step_microbatches`, which is ours: torch's looks up, names and logs every action anew, 6 to 9 us each
- `torch.distributed.pipelining.schedules._Action`: one instruction (`parts` of ours are its `sub_actions`)
- `torch.distributed.pipelining.schedules._ComputationType`: kinds of instructions; it has none for a batch of sends and
  receives, so P2P is written as an OVERLAP_F_B, the other kind with parts
- `torch.autograd._profiler_enabled`: whether anything records named ranges
- `torch.distributed.distributed_c10d._get_default_store`: the key-value store all ranks share
- `torch.distributed.distributed_c10d._resolve_process_group`: the group of a name, as a collective in a graph has it
- `torch._foreach_norm`: norms of many tensors at once, the call that torch's own gradient clipping makes
- `torch._foreach_copy_`: many copies at once, the call that torch's own optimizers make
- `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks` and, for all optimizers, `torch.optim.optimizer.
  _global_optimizer_pre_hooks`, `_global_optimizer_post_hooks`: what would run again when a step is taken again
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.optim.optimizer as optimizers
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule

Work = Callable[[], object]
Watch = Callable[[Action, Work], None]

default_store = _get_default_store
foreach_norm = torch._foreach_norm
foreach_copy = torch._foreach_copy_
group_named: Callable[[Any], dist.ProcessGroup] = _resolve_process_group


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something of the user's runs with every step of the optimizer."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks))


def to_torch(action: Action) -> _Action:
    """Our action as torch's."""
    parts = tuple(map(to_torch, action.parts)) or None
    return _Action(action.stage, _type(action.kind), action.microbatch, parts)


def _type(kind: Kind) -> _ComputationType:
    return _ComputationType((Kind.OVERLAP_F_B if kind is Kind.P2P else kind).value)


_UNNAMED = contextlib.nullcontext()


class ActionLoop(_PipelineScheduleRuntime):
    """torch's pipeline runtime over a table with communication, with a loop that has nothing left to look up."""

    def __init__(self, stages: Sequence[Any], schedule: Schedule, row: Iterable[tuple[Action, Work]]) -> None:
        """`row`: this rank's actions in the order in which to run them, with what each of them does."""
        super().__init__(list(stages), schedule.microbatches, backward_requires_autograd=False)  # type: ignore[no-untyped-call]
        self.stage_index_to_group_rank = dict(schedule.rank_of_stage)
        ours = {rank: [action for action in row if action is not None] for rank, row in enumerate(schedule.table)}
        self.pipeline_order_with_comms = {rank: list(map(to_torch, row)) for rank, row in ours.items()}
        self._row = [(action, f"PP:{to_torch(action)}", work) for action, work in row]

    def run(self, watch: Watch | None = None) -> None:
        """Do this rank's actions once, through `watch` where there is one."""
        self._step_microbatches(watch)

    def _step_microbatches(self, watch: Watch | None = None) -> None:  # type: ignore[override]
        """The loop. Where a profiler is on (`torch.profiler`, or `emit_nvtx`) each action has the name that torch gives it."""
        named = _profiler_enabled()
        for action, name, work in self._row:
            with record_function(name) if named else _UNNAMED:
                if watch is None:
                    work()
                else:
                    watch(action, work)
