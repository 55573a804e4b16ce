"""One stage on this rank: its programs, and what it holds per microbatch.

Contract
--------
- `run(phase, microbatch)` gathers a program's arguments, runs it, and files its results; where everything comes from and
  goes to was resolved when the stage was made (`wiring.py`). `arguments`, `taker` and `file` are its parts, for whoever
  runs several programs as one (`overlap.py`).
- Each microbatch has its variant of the programs: one per shape of microbatch.
- Per microbatch it holds what arrived, what is saved and what is to be sent; each dies when its last reader has run.
- It answers the runtime's `get_fwd_send_ops` .. `get_bwd_recv_ops` from static metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphpp.runtime.gradients import Accumulator, FusedAccumulator, Taker
from graphpp.runtime.program import Boundary, Phase, PipelineProgram, Prepared, Program, TensorMeta
from graphpp.runtime.transport import Message, Transport
from graphpp.runtime.wiring import Wiring, wire

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a stage stands: number of stages, the rank of each (within the group), this rank, ranks in the group."""

    num_stages: int
    rank_of_stage: Mapping[int, int]
    rank: int
    ranks: int


@dataclass(frozen=True)
class Feed:
    """What a step is given: per microbatch its tensors by path, the seed of its backward, its key for random numbers."""

    inputs: Sequence[Mapping[str, torch.Tensor]]
    seeds: Sequence[torch.Tensor] = ()
    keys: Sequence[int] = ()


@dataclass(frozen=True)
class Variant:
    """One stage's programs for one shape of microbatch, and what crosses the boundaries below and above it."""

    wirings: Mapping[Phase, Wiring]
    below: Boundary
    above: Boundary
    prepare: Wiring | None = None

    @classmethod
    def of(cls, pipeline: PipelineProgram, index: int) -> Variant:
        """Stage `index` of a pipeline's programs."""
        stage, last = pipeline.stages[index], len(pipeline.stages) - 1
        below = pipeline.boundaries[index - 1] if index else Boundary(-1)
        above = pipeline.boundaries[index] if index < last else Boundary(index)
        arriving = {phase: above.backward if phase.is_backward else below.forward for phase in stage.programs}
        wirings = {phase: wire(item, arriving[phase], stage.constants) for phase, item in stage.programs.items()}
        prepare = wire(stage.prepare, (), stage.constants) if stage.prepare is not None else None
        return cls(wirings, below, above, prepare)

    @property
    def backwards(self) -> list[Wiring]:
        """The wirings of the backward, whole and in parts."""
        return [wiring for phase, wiring in self.wirings.items() if phase.is_backward]

    def outlives(self, phase: Phase) -> frozenset[str]:
        """The saved values that are read again after `phase`: those of W, after I."""
        later = self.wirings.get(Phase.WEIGHT_GRAD) if phase is Phase.INPUT_GRAD else None
        return frozenset(name for _, name in later.saved) if later is not None else frozenset()


@dataclass(frozen=True)
class _Step:
    tensor: Callable[[str], torch.Tensor]
    feed: Feed


class GraphStage:
    """A stage of the pipeline; made once per pipeline and number of microbatches."""

    def __init__(self, index: int, variants: Sequence[Variant], place: Place, transport: Transport) -> None:
        self.stage_index, self.num_stages = index, place.num_stages
        self.group_rank, self.group_size = place.rank, place.ranks
        self.submod = None
        self._place, self._transport = place, transport
        self._variants = tuple(variants)  # by microbatch
        backwards = [wiring for variant in self._distinct() for wiring in variant.backwards]
        fqns = dict.fromkeys(fqn for wiring in backwards for fqn in wiring.gradients.values())
        kind = FusedAccumulator if any(wiring.program.fused for wiring in backwards) else Accumulator
        self.gradients = kind(fqns, {fqn for wiring in backwards for fqn in wiring.shared_gradients})
        self._step: _Step | None = None
        self._arrived: dict[tuple[str, int], Message] = {}
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self._leaving: dict[tuple[str, int], Tensors] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, dict[int, torch.Tensor]] = {}
        self.metrics: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def is_first(self) -> bool:
        """Whether no stage comes before this one."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.stage_index == self.num_stages - 1

    def begin(self, tensor: Callable[[str], torch.Tensor], feed: Feed) -> None:
        """Start a step: `tensor` gives parameters and buffers by FQN."""
        self.clear()
        self._step = _Step(tensor, feed)
        known: dict[Any, Mapping[str, torch.Tensor]] = {}
        for variant in self._distinct():
            prepared = self._prepared(variant.prepare, known)
            for wiring in variant.wirings.values():
                self._bind(wiring)
                for index, name in wiring.prepared:
                    wiring.bound[index] = prepared[name]

    def _bind(self, wiring: Wiring) -> None:
        """Fill in what stays the same for a step."""
        assert self._step is not None
        wiring.bound = [None] * len(wiring.program.inputs)
        for index, fqn in wiring.fixed:
            wiring.bound[index] = self._step.tensor(fqn).detach()
        for index, constant in wiring.constants:
            wiring.bound[index] = constant

    def _prepared(
        self, wiring: Wiring | None, known: dict[Any, Mapping[str, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """What a variant makes once per step; `known`: what others of the same text have made."""
        if wiring is None:
            return {}
        item = wiring.program
        key = (item.source, item.inputs, tuple(id(constant) for _, constant in wiring.constants))
        if key not in known:
            self._bind(wiring)
            boxed, wiring.bound = wiring.bound, []
            names = [role.name for role in item.outputs if isinstance(role, Prepared)]
            known[key] = dict(zip(names, item.run(boxed), strict=True))
        return known[key]

    def end(self) -> None:
        """Drop parameters, inputs and seeds after a step; losses and outputs stay until the next one begins."""
        self._step = None
        for wiring in self._wirings():
            wiring.bound = []

    def _distinct(self) -> list[Variant]:
        return list({id(variant): variant for variant in self._variants}.values())

    def _wirings(self) -> list[Wiring]:
        return [wiring for variant in self._distinct() for wiring in variant.wirings.values()]

    def clear(self) -> None:
        """Drop everything held per microbatch."""
        self._arrived.clear()
        self._saved.clear()
        self._leaving.clear()
        self.losses.clear()
        self.outputs.clear()
        self.metrics.clear()

    def run(self, phase: Phase, microbatch: int) -> None:
        """Run one phase of one microbatch and file its results."""
        run, take = self.program(phase, microbatch).run, self.taker(phase, microbatch)
        arguments = self.arguments(phase, microbatch)
        self.file(phase, microbatch, run(arguments) if take is None else run(arguments, take))

    def program(self, phase: Phase, microbatch: int) -> Program:
        """The program of one phase of one microbatch."""
        return self._variants[microbatch].wirings[phase].program

    def arguments(self, phase: Phase, microbatch: int) -> list[Any]:
        """The arguments of one phase of one microbatch, which are handed over once; waits for what is still to arrive."""
        variant = self._variants[microbatch]
        return self._arguments(variant.wirings[phase], _direction(phase), microbatch, variant.outlives(phase))

    def taker(self, phase: Phase, microbatch: int) -> Taker | None:
        """What a program hands its gradients to, with their indices: they are added up as soon as they are made."""
        fqns = self._variants[microbatch].wirings[phase].gradients
        return Taker(self.gradients, microbatch, fqns) if fqns else None

    def file(self, phase: Phase, microbatch: int, results: Sequence[Any]) -> None:
        """File the results of one phase of one microbatch; gradients that were handed out are None."""
        wiring = self._variants[microbatch].wirings[phase]
        for index, fqn in wiring.gradients.items():
            if results[index] is not None:
                self.gradients.take(microbatch, fqn, results[index])
        if not phase.is_backward:
            self._file_forward(wiring, microbatch, results)
        if wiring.keeps:
            self._saved.setdefault(microbatch, {}).update((name, results[index]) for index, name in wiring.keeps)
        if phase is not Phase.WEIGHT_GRAD:
            self._leaving[_direction(phase), microbatch] = [results[index] for index in wiring.sends]

    def _arguments(self, wiring: Wiring, direction: str, microbatch: int, outliving: frozenset[str]) -> list[Any]:
        assert self._step is not None, "begin() comes first"
        feed = self._step.feed
        boxed = wiring.bound.copy()
        for index, path in wiring.inputs:
            boxed[index] = feed.inputs[microbatch][path].to(self._transport.device, non_blocking=True)
        for index in wiring.seeds:
            boxed[index] = feed.seeds[microbatch]
        for index in wiring.keys:
            boxed[index] = feed.keys[microbatch]
        message = self._arrived.pop((direction, microbatch), None)
        tensors = self._transport.wait(message) if message is not None else []
        for index, place in wiring.received:
            boxed[index] = tensors[place]
        saved = self._saved.pop(microbatch, {})
        for index, name in wiring.saved:
            boxed[index] = saved[name]
        if outliving:
            self._saved[microbatch] = {name: value for name, value in saved.items() if name in outliving}
        return boxed

    def _file_forward(self, wiring: Wiring, microbatch: int, results: Sequence[torch.Tensor]) -> None:
        for index, fqn in wiring.updates:
            assert self._step is not None
            self._step.tensor(fqn).copy_(results[index])
        for index in wiring.losses:
            self.losses[microbatch] = results[index].clone()  # a loss may be a view of something large
        if wiring.outputs:
            self.outputs[microbatch] = {leaf: results[index] for index, leaf in wiring.outputs}
        if wiring.metrics:
            self.metrics[microbatch] = {name: results[index].clone() for index, name in wiring.metrics}

    def held(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The saved values of a microbatch by name, which may be taken out as long as they are back before they are read."""
        return self._saved.setdefault(microbatch, {})

    def take_leaving(self, direction: str, microbatch: int) -> Tensors:
        """What this stage made for its neighbour; it is handed over once."""
        return self._leaving.pop((direction, microbatch))

    def arrive(self, direction: str, microbatch: int, tensors: Tensors) -> None:
        """Take what a neighbouring stage on this rank made."""
        self._arrived[direction, microbatch] = Message([], tensors, self.group_rank)

    def arriving(self, direction: str, microbatch: int) -> Message:
        """The message that was last asked for with `get_fwd_recv_ops` or `get_bwd_recv_ops`."""
        return self._arrived[direction, microbatch]

    def peer(self, direction: str) -> int:
        """The rank that this stage's activations (F) or gradients (B) go to."""
        return self._place.rank_of_stage[self.stage_index + (1 if direction == "F" else -1)]

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that send this microbatch's activations to the next stage."""
        tensors, metas = self.take_leaving("F", microbatch), self._variants[microbatch].above.forward
        return self._transport.send_ops(tensors, metas, self.peer("F"))

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that send this microbatch's gradients to the previous stage."""
        tensors, metas = self.take_leaving("B", microbatch), self._variants[microbatch].below.backward
        return self._transport.send_ops(tensors, metas, self.peer("B"))

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that receive this microbatch's activations, into buffers made now."""
        return self._receive_ops("F", microbatch, self._variants[microbatch].below.forward, self.stage_index - 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Operations that receive this microbatch's gradients, into buffers made now."""
        return self._receive_ops("B", microbatch, self._variants[microbatch].above.backward, self.stage_index + 1)

    def _receive_ops(
        self, direction: str, microbatch: int, metas: Sequence[TensorMeta], source: int
    ) -> list[dist.P2POp]:
        message = self._transport.incoming(metas, self._place.rank_of_stage[source])
        self._arrived[direction, microbatch] = message
        return self._transport.receive_ops(message)


def _direction(phase: Phase) -> str:
    """The way that the results of a phase go: up (F) or down (B)."""
    return "B" if phase.is_backward else "F"
