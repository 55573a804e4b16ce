"""One stage on this rank: its programs, and what it holds per microbatch.

Contract
--------
- `task(phase, microbatch, neighbour)` is one piece of the stage's work, bound to everything it reads and writes (`task.py`).
- `sending` and `receiving` do the same for the messages to and from stages on other ranks, from static metadata.
- Each microbatch has its variant of the programs: one per shape of microbatch.
- Per microbatch it holds what arrived, what is saved and what is to be sent; each dies when its last reader has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphpp.runtime.gradients.accumulate import Accumulator, FusedAccumulator, Taker
from graphpp.runtime.program import Boundary, Phase, PipelineProgram, Prepared, TensorMeta
from graphpp.runtime.task import Feed, Held, Part, Source, Task
from graphpp.runtime.transport import Parcel, Transport
from graphpp.runtime.wiring import Wiring, wire


@dataclass(frozen=True)
class Place:
    """Where a stage stands: number of stages, the rank of each (within the group), this rank, ranks in the group."""

    num_stages: int
    rank_of_stage: Mapping[int, int]
    rank: int
    ranks: int


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
        self.holding = Held(transport.device)

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
        self.holding.clear()
        self.holding.tensor, self.holding.feed = tensor, feed
        known: dict[Any, Mapping[str, torch.Tensor]] = {}
        for variant in self._distinct():
            prepared = self._prepared(variant.prepare, known)
            for wiring in variant.wirings.values():
                self._bind(wiring)
                for index, name in wiring.prepared:
                    wiring.bound[index] = prepared[name]

    def _bind(self, wiring: Wiring) -> None:
        """Fill in what stays the same for a step."""
        assert self.holding.tensor is not None, "begin() comes first"
        wiring.bound = [None] * len(wiring.program.inputs)
        for index, fqn in wiring.fixed:
            wiring.bound[index] = self.holding.tensor(fqn).detach()
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
        self.holding.tensor = self.holding.feed = None
        for wiring in self._wirings():
            wiring.bound = []

    def _distinct(self) -> list[Variant]:
        return list({id(variant): variant for variant in self._variants}.values())

    def _wirings(self) -> list[Wiring]:
        return [wiring for variant in self._distinct() for wiring in variant.wirings.values()]

    # ------------------------------------------------------------------------------ computing

    def task(self, phase: Phase, microbatch: int, neighbour: GraphStage | None) -> Task:
        """One phase of one microbatch; `neighbour`: the stage that its values come from, if that is on this rank."""
        variant = self._variants[microbatch]
        part = Part(variant.wirings[phase], phase, microbatch, variant.outlives(phase))
        return Task(part, self.holding, self._source(part, neighbour), self.taker(phase, microbatch))

    def taker(self, phase: Phase, microbatch: int) -> Taker | None:
        """What a program hands its gradients to, with their indices: they are added up as soon as they are made."""
        fqns = self._variants[microbatch].wirings[phase].gradients
        return Taker(self.gradients, microbatch, fqns) if fqns else None

    def held(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The saved values of a microbatch by name, which may be taken out as long as they are back before they are read."""
        return self.holding.saved.setdefault(microbatch, {})

    def _source(self, part: Part, neighbour: GraphStage | None) -> Source | None:
        """Where what arrives with a task comes from; None where nothing does."""
        key = part.direction, part.microbatch
        if part.phase is Phase.WEIGHT_GRAD or not 0 <= self.stage_index - _step(part.direction) < self.num_stages:
            return None
        if neighbour is not None:
            return partial(neighbour.holding.leaving.pop, key)
        wait, arrived = self._transport.wait, self.holding.arrived
        return lambda: wait(arrived.pop(key))

    # ------------------------------------------------------------------------------ messages

    def sending(self, direction: str, microbatch: int) -> Callable[[], Parcel]:
        """Makes the message with this microbatch's activations (F) or gradients (B) for the next stage that way."""
        metas, peer = self._crossing(direction, microbatch, leaving=True)
        leaving, pack = self.holding.leaving, self._transport.outgoing
        return lambda: pack(leaving.pop((direction, microbatch)), metas, peer)

    def receiving(self, direction: str, microbatch: int) -> Callable[[], Parcel]:
        """Makes memory for what arrives that way, at the moment at which it is asked for."""
        metas, peer = self._crossing(direction, microbatch, leaving=False)
        arrived, room = self.holding.arrived, self._transport.incoming

        def receive() -> Parcel:
            parcel = room(metas, peer)
            arrived[direction, microbatch] = parcel.message
            return parcel

        return receive

    def _crossing(self, direction: str, microbatch: int, *, leaving: bool) -> tuple[Sequence[TensorMeta], int]:
        """What crosses the boundary on one side of this stage that way, and the rank beyond it."""
        variant, upwards = self._variants[microbatch], direction == "F"
        boundary = variant.above if leaving == upwards else variant.below
        beyond = self.stage_index + (_step(direction) if leaving else -_step(direction))
        return boundary.forward if upwards else boundary.backward, self._place.rank_of_stage[beyond]


def _step(direction: str) -> int:
    """From a stage's index to that of the next one that way."""
    return 1 if direction == "F" else -1
