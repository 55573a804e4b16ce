"""The private names of torch that the runtime stands on; no other file of `runtime/` touches one.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch.distributed.pipelining.schedules._PipelineScheduleRuntime`: the loop that walks a rank's actions. Its hooks that
  would run the user's module to learn shapes, or look for losses on stages, are closed here: both are known from the graph.
- `torch.distributed.pipelining.schedules._Action`: one instruction (`parts` of ours are its `sub_actions`)
- `torch.distributed.pipelining.schedules._ComputationType`: kinds of instructions; it has none for a batch of sends and
  receives, so P2P goes through the loop as an OVERLAP_F_B, the other kind with parts
- `torch.distributed.pipelining.schedules._PipelineContext`: what the loop hands to a handler
- `torch.distributed.distributed_c10d._get_default_store`: the key-value store all ranks share
- `torch.distributed.distributed_c10d._resolve_process_group`: the group of a name, as a collective in a graph has it
- `torch._foreach_norm`: norms of many tensors at once, the call that torch's own gradient clipping makes
- `torch._foreach_copy_`: many copies at once, the call that torch's own optimizers make
- `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks` and, for all optimizers, `torch.optim.optimizer.
  _global_optimizer_pre_hooks`, `_global_optimizer_post_hooks`: what would run again when a step is taken again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.optim.optimizer as optimizers
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineContext,
    _PipelineScheduleRuntime,
)

from graphpp.runtime.actions import Action, Kind
from graphpp.runtime.schedule import Schedule

Handler = Callable[[Action], None]

_LOG = logging.getLogger(_PipelineScheduleRuntime.__module__)

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


class ActionLoop(_PipelineScheduleRuntime):
    """torch's pipeline runtime over a table with communication; every kind of action goes to our handler for it."""

    def __init__(self, stages: Sequence[Any], schedule: Schedule, handlers: Mapping[Kind, Handler]) -> None:
        super().__init__(list(stages), schedule.microbatches, backward_requires_autograd=False)  # type: ignore[no-untyped-call]
        self.stage_index_to_group_rank = dict(schedule.rank_of_stage)
        ours = {rank: [action for action in row if action is not None] for rank, row in enumerate(schedule.table)}
        self.pipeline_order_with_comms = {rank: list(map(to_torch, row)) for rank, row in ours.items()}
        actions = dict(zip(self.pipeline_order_with_comms[self.rank], ours[self.rank], strict=True))
        for kind in handlers:
            # The public registration refuses sends and receives, which are ours as well: the loop looks here first.
            self._comp_type_to_function_map[_type(kind)] = _adapted(actions, handlers)

    def run(self) -> None:
        """Walk this rank's actions once. What the loop would log of an error, the whole table, is not worth a screen."""
        before = _LOG.level
        _LOG.setLevel(logging.CRITICAL)
        try:
            self._step_microbatches()
        finally:
            _LOG.setLevel(before)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to find out: shapes are known from the graph, and the user's module is never run."""

    def _update_losses(self, *args: Any, **kwargs: Any) -> None:
        """Losses are results of stage programs, not of a loss function held by the loop."""


def _adapted(
    actions: Mapping[_Action, Action], handlers: Mapping[Kind, Handler]
) -> Callable[[_Action, _PipelineContext], None]:
    """Our handler goes by our action's kind, since two of ours share one of torch's."""

    def run(action: _Action, context: _PipelineContext) -> None:
        ours = actions[action]
        handlers[ours.kind](ours)

    return run
