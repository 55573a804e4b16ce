"""One stage on this rank: its programs, its tensors, and what it holds per microbatch.

Contract
--------
- `run(phase, microbatch)` takes inputs by role, runs the program, and files the results by role. Nothing is looked up by
  name at run time: where each input comes from is resolved when the stage is made.
- Per microbatch it holds what arrived, what is saved and what is to be sent; each dies when its last reader has run.
- It answers the runtime's `get_fwd_send_ops` .. `get_bwd_recv_ops` from static metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from graphpp.runtime import program
from graphpp.runtime.gradients import Accumulator
from graphpp.runtime.program import Boundary, Phase, Program, StageProgram, TensorMeta
from graphpp.runtime.transport import Message, Transport

Tensors = list[torch.Tensor]
Inputs = Sequence[Mapping[str, torch.Tensor]]

_FORWARDS = (Phase.FORWARD, Phase.EVALUATE)


@dataclass(frozen=True)
class Place:
    """Where a stage stands: number of stages, the rank of each (within the group), this rank, ranks in the group."""

    num_stages: int
    rank_of_stage: Mapping[int, int]
    rank: int
    ranks: int


@dataclass
class _Wiring:
    """A program with its inputs and results resolved to (index, key) by kind."""

    program: Program
    fixed: list[tuple[int, str]] = field(default_factory=list)
    constants: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    inputs: list[tuple[int, str]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    received: list[tuple[int, str]] = field(default_factory=list)
    saved: list[tuple[int, str]] = field(default_factory=list)
    bound: list[Any] = field(default_factory=list)


class GraphStage:
    """A stage of the pipeline; made once per pipeline and number of microbatches."""

    def __init__(self, stage: StageProgram, boundaries: Sequence[Boundary], place: Place, transport: Transport) -> None:
        self.program = stage
        self.stage_index = stage.index
        self.num_stages = place.num_stages
        self.group_rank = place.rank
        self.group_size = place.ranks
        self.submod = None
        self._place = place
        self._transport = transport
        self._below = boundaries[stage.index - 1] if stage.index else Boundary(-1)
        self._above = boundaries[stage.index] if stage.index < place.num_stages - 1 else Boundary(stage.index)
        self._wirings = {phase: _wire(item, stage.constants) for phase, item in stage.programs.items()}
        self.gradients = Accumulator(*_gradients(stage))
        self._arrived: dict[tuple[str, int], Message] = {}
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self._leaving: dict[tuple[str, int], Tensors] = {}
        self._inputs: Inputs = ()
        self._seeds: Sequence[torch.Tensor] = ()
        self._tensor: Callable[[str], torch.Tensor] | None = None
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, dict[int, torch.Tensor]] = {}

    @property
    def is_first(self) -> bool:
        """Whether no stage comes before this one."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.stage_index == self.num_stages - 1

    def begin(self, tensor: Callable[[str], torch.Tensor], inputs: Inputs, seeds: Sequence[torch.Tensor]) -> None:
        """Start a step: parameters and buffers by FQN, the microbatches' tensors by path, one seed per microbatch."""
        self.clear()
        self._tensor, self._inputs, self._seeds = tensor, inputs, seeds
        for wiring in self._wirings.values():
            wiring.bound = [None] * len(wiring.program.inputs)
            for index, fqn in wiring.fixed:
                wiring.bound[index] = tensor(fqn).detach()
            for index, constant in wiring.constants:
                wiring.bound[index] = constant

    def clear(self) -> None:
        """Drop everything held per microbatch."""
        for held in (self._arrived, self._saved, self._leaving, self.losses, self.outputs):
            held.clear()  # type: ignore[attr-defined]

    def release(self) -> None:
        """Drop parameters, inputs and seeds after a step, so that nothing outlives it."""
        self._inputs, self._seeds = (), ()
        for wiring in self._wirings.values():
            wiring.bound = []

    def run(self, phase: Phase, microbatch: int) -> None:
        """Run one phase of one microbatch and file its results."""
        wiring = self._wirings[phase]
        boxed = wiring.bound.copy()
        for index, path in wiring.inputs:
            boxed[index] = self._inputs[microbatch][path]
        for index in wiring.seeds:
            boxed[index] = self._seeds[microbatch]
        self._take_received(wiring, phase, microbatch, boxed)
        self._take_saved(wiring, microbatch, boxed)
        results = wiring.program.run(boxed)
        self._file(wiring.program, microbatch, results)

    def _take_received(self, wiring: _Wiring, phase: Phase, microbatch: int, boxed: list[Any]) -> None:
        forward = phase in _FORWARDS
        metas = self._below.forward if forward else self._above.backward
        message = self._arrived.pop(("F" if forward else "B", microbatch), None)
        tensors = message.wait() if message is not None else []
        by_name = {meta.name: tensor for meta, tensor in zip(metas, tensors, strict=True)}
        for index, name in wiring.received:
            boxed[index] = by_name[name]

    def _take_saved(self, wiring: _Wiring, microbatch: int, boxed: list[Any]) -> None:
        saved = self._saved.pop(microbatch, {}) if wiring.saved else {}
        for index, name in wiring.saved:
            boxed[index] = saved[name]

    def _file(self, item: Program, microbatch: int, results: Sequence[Any]) -> None:
        saved: dict[str, torch.Tensor] = {}
        leaving: Tensors = []
        gradients: Tensors = []
        for role, value in zip(item.outputs, results, strict=True):
            match role:
                case program.Saved(name):
                    saved[name] = value
                case program.Sent():
                    leaving.append(value)
                case program.Gradient():
                    gradients.append(value)
                case program.BufferUpdate(fqn):
                    assert self._tensor is not None
                    self._tensor(fqn).copy_(value)
                case program.Loss():
                    self.losses[microbatch] = value
                case program.Output(index):
                    self.outputs.setdefault(microbatch, {})[index] = value
        if saved:
            self._saved[microbatch] = saved
        if item.phase is Phase.BACKWARD:
            self.gradients.add(microbatch, gradients)
        self._hand_on(item.phase, microbatch, leaving)

    def _hand_on(self, phase: Phase, microbatch: int, leaving: Tensors) -> None:
        direction = "F" if phase in _FORWARDS else "B"
        self._leaving[direction, microbatch] = leaving

    def take_leaving(self, direction: str, microbatch: int) -> Tensors:
        """What this stage made for its neighbour; it is handed over once."""
        return self._leaving.pop((direction, microbatch))

    def arrive(self, direction: str, microbatch: int, tensors: Tensors) -> None:
        """Take what a neighbouring stage on this rank made."""
        self._arrived[direction, microbatch] = Message([], tensors, self.group_rank)

    def arriving(self, direction: str, microbatch: int) -> Message:
        """The message that was last asked for with `get_fwd_recv_ops` or `get_bwd_recv_ops`."""
        return self._arrived[direction, microbatch]

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that send this microbatch's activations to the next stage."""
        return self._transport.send_ops(
            self.take_leaving("F", microbatch), self._above.forward, self.peer("F")
        )

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that send this microbatch's gradients to the previous stage."""
        return self._transport.send_ops(
            self.take_leaving("B", microbatch), self._below.backward, self.peer("B")
        )

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that receive this microbatch's activations, into buffers made now."""
        return self._receive("F", microbatch, self._below.forward, self.stage_index - 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that receive this microbatch's gradients, into buffers made now."""
        return self._receive("B", microbatch, self._above.backward, self.stage_index + 1)

    def _receive(self, direction: str, microbatch: int, metas: Sequence[TensorMeta], source: int) -> list[dist.P2POp]:
        peer = self._place.rank_of_stage[source]
        buffers = self._transport.buffers(metas)
        self._arrived[direction, microbatch] = Message([], buffers, peer)
        return self._transport.receive_ops(buffers, metas, peer)

    def peer(self, direction: str) -> int:
        """The rank that this stage's activations (F) or gradients (B) go to."""
        return self._place.rank_of_stage[self.stage_index + (1 if direction == "F" else -1)]


def _wire(item: Program, constants: Mapping[str, torch.Tensor]) -> _Wiring:
    wiring = _Wiring(item)
    for index, role in enumerate(item.inputs):
        match role:
            case program.Parameter(fqn) | program.Buffer(fqn):
                wiring.fixed.append((index, fqn))
            case program.Constant(name):
                wiring.constants.append((index, constants[name]))
            case program.Input(path):
                wiring.inputs.append((index, path))
            case program.Seed():
                wiring.seeds.append(index)
            case program.Received(name):
                wiring.received.append((index, name))
            case program.Saved(name):
                wiring.saved.append((index, name))
    return wiring


def _gradients(stage: StageProgram) -> tuple[list[str], list[bool]]:
    """FQNs of the gradients that the backward makes, and whether each shares memory with something else."""
    backward = stage.programs.get(Phase.BACKWARD)
    found = enumerate(backward.outputs) if backward is not None else ()
    places = [(role.fqn, index) for index, role in found if isinstance(role, program.Gradient)]
    return [fqn for fqn, _ in places], [index in backward.shared for _, index in places] if backward else []
