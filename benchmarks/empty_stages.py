"""Stages that pass on one float, forward along the stages and back: graphpp's, torch's, and their messages alone.

Contract: all work over one table. `empty_program` is the input of graphpp's runner. `torch_loop` runs torch's own runtime
over stages without a module. `messages` posts the table's sends and receives, waits for each where its value is read, and does
nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import RANK
from torch import Tensor
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from graphpp.runtime.action_loop import to_torch
from graphpp.runtime.program import (
    Boundary,
    Input,
    Loss,
    Phase,
    PipelineProgram,
    Program,
    Received,
    Seed,
    Sent,
    StageProgram,
    TensorMeta,
)
from graphpp.schedules.table.actions import SENDS, Action, Kind, message, upstream
from graphpp.schedules.table.schedule import Schedule

STAGES = 4


def empty_program() -> PipelineProgram:
    """Stages that pass on one float: forward along the stages, and back."""
    stages = tuple(
        StageProgram(index, {Phase.FORWARD: forward(index), Phase.BACKWARD: backward(index)}, (), (), ())
        for index in range(STAGES)
    )
    boundaries = tuple(Boundary(stage, (meta(f"x{stage}"),), (meta(f"g{stage}"),)) for stage in range(STAGES - 1))
    return PipelineProgram(stages, boundaries, TensorMeta("loss", (1,), (1,), torch.float32))


def forward(stage: int) -> Program:
    source = Received(f"x{stage - 1}") if stage else Input("args[0]")
    result = Sent(f"x{stage}") if stage < STAGES - 1 else Loss()
    return Program(stage, Phase.FORWARD, (source,), (result,), hand_on)


def backward(stage: int) -> Program:
    source = Received(f"g{stage}") if stage < STAGES - 1 else Seed()
    results = (Sent(f"g{stage - 1}"),) if stage else ()
    return Program(stage, Phase.BACKWARD, (source,), results, hand_on if stage else nothing)


def meta(name: str) -> TensorMeta:
    return TensorMeta(name, (1,), (1,), torch.float32)


def hand_on(boxed: list[Any]) -> tuple[Any, ...]:
    values = tuple(value.reshape(1) for value in boxed) if boxed[0].dim() == 0 else tuple(boxed)
    boxed.clear()
    return values


def nothing(boxed: list[Any]) -> tuple[Any, ...]:
    boxed.clear()
    return ()


# ------------------------------------------------------------------------------------------------ torch's runtime


class EmptyStage:
    """The methods that torch's loop calls on a stage, each answered with one float; it keeps no values of earlier actions."""

    submod = None

    def __init__(self, index: int, table: Schedule) -> None:
        self.stage_index, self.num_stages = index, STAGES
        self.group_rank, self.group_size = RANK, table.ranks
        self.is_first, self.is_last = index == 0, index == STAGES - 1
        self._rank_of, self._value = table.rank_of_stage, torch.ones(1)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._value

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None: ...

    def set_local_fwd_input(self, *args: Any) -> None: ...

    def set_local_bwd_input(self, *args: Any) -> None: ...

    def release_fwd_send_outputs(self, *args: Any) -> None: ...

    def get_local_bwd_output(self, microbatch: int) -> Tensor:
        return self._value

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.isend, self._value, self._rank_of[self.stage_index + 1])]

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.isend, self._value, self._rank_of[self.stage_index - 1])]

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.irecv, torch.empty(1), self._rank_of[self.stage_index - 1])]

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.irecv, torch.empty(1), self._rank_of[self.stage_index + 1])]


class TorchLoop(_PipelineScheduleRuntime):
    """torch's own loop over a given table, without its initialisation of stages."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None: ...


def torch_loop(table: Schedule) -> Callable[[], object]:
    """A step of torch's runtime, which waits for all sends at its end."""
    stages = [EmptyStage(stage, table) for stage in range(STAGES) if table.rank_of_stage[stage] == RANK]
    loop = TorchLoop(stages, table.microbatches, backward_requires_autograd=False)
    loop.pipeline_order_with_comms = {
        rank: [to_torch(action) for action in row if action is not None] for rank, row in enumerate(table.table)
    }
    args: list[Any] = [()] * table.microbatches
    kwargs: list[Any] = [{}] * table.microbatches
    return lambda: loop._step_microbatches(args, kwargs)


# ------------------------------------------------------------------------------------------------ messages alone


def messages(table: Schedule) -> Callable[[], object]:
    """The table's sends and receives, posted in its order."""
    value = torch.ones(1)
    steps = [(action, _peer(action, table), _received(action, table)) for action in table.table[RANK] if action]

    def step() -> None:
        arriving: dict[Action, Any] = {}
        sent: deque[Any] = deque()
        for action, peer, receive in steps:
            if action.kind in SENDS:
                if len(sent) > 1:
                    sent.popleft().wait()
                sent.append(dist.isend(value, peer))
            elif action.is_communication:
                arriving[action] = dist.irecv(torch.empty(1), peer)
            elif receive in arriving:
                arriving.pop(receive).wait()
        for work in sent:
            work.wait()

    return step


def _peer(action: Action, table: Schedule) -> int:
    step = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}.get(action.kind, 0)
    return table.rank_of_stage[action.stage + step]


def _received(action: Action, table: Schedule) -> Action | None:
    makers = upstream(action, table.stages) if action.is_compute else ()
    pair = message(makers[0], table.stages) if makers else None
    return pair[1] if pair else None
