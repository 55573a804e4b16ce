"""One stage on this rank: its programs for every microbatch, its buffers during a step, its gradient sums.

- `task(phase, microbatch, neighbour)` makes one piece of the stage's work, bound to everything that it reads and writes
  (`task.py`). `send_message` and `receive_message` do the same for messages to and from stages on other ranks.
- All of these are made before the first step, from static metadata: each microbatch shape has one `Variant` of the programs.
- During a step `buffers` has, per microbatch, the values that arrived, the saved values and the values to send. The last reader
  frees each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.fsdp.sharded_gradients import LayerReducer, LayerSink
from graphpp.runtime.gradients.accumulate import Accumulator, FusedAccumulator, MicrobatchSink
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel
from graphpp.runtime.messages.mailbox import Mailbox, Message
from graphpp.runtime.messages.wire_layout import WireLayout, layout_of
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.program import Boundary, Phase, PipelineProgram, StepInvariant
from graphpp.runtime.task import Receive, StageBuffers, StepInputs, Task, TaskGraphs, TaskKey
from graphpp.runtime.wiring import Wiring, wire
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from graphpp.streams import InputCopies


@dataclass(frozen=True)
class Variant:
    """One stage's programs for one microbatch shape, and the values that cross the boundaries below and above the stage."""

    wirings: Mapping[Phase, Wiring]
    below: Boundary
    above: Boundary
    hoisted: Wiring | None = None

    @classmethod
    def of(cls, pipeline: PipelineProgram, index: int, name: Callable[[str], str] = str) -> Variant:
        """`name`: as for `wire`."""
        stage, last = pipeline.stages[index], len(pipeline.stages) - 1
        below = pipeline.boundaries[index - 1] if index else Boundary(-1)
        above = pipeline.boundaries[index] if index < last else Boundary(index)
        arriving = {phase: above.backward if phase.is_backward else below.forward for phase in stage.programs}
        held = stage.constants, pipeline.sizes, name
        wirings = {phase: wire(item, arriving[phase], *held) for phase, item in stage.programs.items()}
        hoisted = wire(stage.hoisted, (), *held) if stage.hoisted is not None else None
        return cls(wirings, below, above, hoisted)

    @property
    def backwards(self) -> list[Wiring]:
        return [wiring for phase, wiring in self.wirings.items() if phase.is_backward]

    def read_after(self, phase: Phase) -> frozenset[str]:
        """Names of the saved values that later phases read: after I those of W, after R those of the backward."""
        last = self.wirings.get(Phase.WEIGHT_GRAD)
        later = {Phase.INPUT_GRAD: [last] if last else [], Phase.RECOMPUTE: self.backwards}.get(phase, [])
        return frozenset(name for wiring in later for _, name in wiring.saved)


class GraphStage:
    def __init__(
        self,
        index: int,
        variants: Sequence[Variant],
        schedule: Schedule,
        place: RankPlace,
        mailbox: Mailbox,
        kernel: MatmulKernel | None = None,
        reducer: LayerReducer | None = None,
        graphs: TaskGraphs | None = None,
    ) -> None:
        """`variants`: one per microbatch. `kernel` is for fused programs, `reducer` for gathers of single layers."""
        self.stage_index, self.num_stages = index, schedule.stages
        self.group_rank, self.group_size = place.rank, place.ranks
        self.submod = None
        self._rank_of_stage, self._mailbox, self._reducer, self._graphs = schedule.rank_of_stage, mailbox, reducer, graphs
        self._variants = tuple(variants)
        backwards = [wiring for variant in self._distinct() for wiring in variant.backwards]
        fqns = dict.fromkeys(fqn for wiring in backwards for fqn in wiring.gradients.values())
        shared = {fqn for wiring in backwards for fqn in wiring.shared_gradients}
        accumulator = FusedAccumulator if any(wiring.program.fused for wiring in backwards) else Accumulator
        self.gradients = accumulator(fqns, shared, kernel, None if graphs is None else graphs.owns)
        self.buffers = StageBuffers(InputCopies(mailbox.device))
        hoisted = [variant.hoisted for variant in self._distinct() if variant.hoisted is not None]
        self._hoists = {id(each): each.program.run if graphs is None else graphs.task(each.program) for each in hoisted}

    @property
    def is_first(self) -> bool:
        """Read by torch's runtime, as `is_last`."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def reads(self) -> frozenset[str]:
        """FQNs of the parameters and buffers that the stage's programs take or write."""
        wirings = [*self._wirings(), *(variant.hoisted for variant in self._distinct() if variant.hoisted is not None)]
        return frozenset(fqn for wiring in wirings for _, fqn in (*wiring.fixed, *wiring.updates))

    @property
    def reads_numbers(self) -> bool:
        """Whether a program takes a number from the host's memory."""
        return any(wiring.numbers for wiring in self._wirings())

    def paths(self, microbatch: int) -> set[str]:
        """The paths of a microbatch's tensors that the stage's programs read."""
        return {path for wiring in self._variants[microbatch].wirings.values() for _, path in wiring.inputs}

    def begin(self, parameter_or_buffer: Callable[[str], torch.Tensor], inputs: StepInputs) -> None:
        """Start a step; `parameter_or_buffer` gives the values of the model's tensors by FQN, detached."""
        self.buffers.clear()
        self.buffers.parameter_or_buffer, self.buffers.inputs = parameter_or_buffer, inputs
        self.gradients.silent = inputs.silent
        for wiring in self._wirings():
            self._bind(wiring)

    def prepare(self) -> None:
        """Compute the step-invariant values. Called before the first computation of a step, and after `put_away`."""
        known: list[tuple[Any, Mapping[str, torch.Tensor]]] = []
        for variant in self._distinct():
            invariants = self._step_invariants(variant.hoisted, known)
            for wiring in variant.wirings.values():
                for index, name in wiring.step_invariants:
                    wiring.bound[index] = invariants[name]

    def put_away(self) -> None:
        """Drop the step-invariant values until `prepare` is called."""
        for wiring in self._wirings():
            for index, _ in wiring.step_invariants:
                wiring.bound[index] = None

    def _bind(self, wiring: Wiring) -> None:
        """Fill in the arguments that are the same for all microbatches of a step."""
        assert self.buffers.parameter_or_buffer is not None, "begin() comes first"
        wiring.bound = [None] * len(wiring.program.inputs)
        for index, fqn in wiring.fixed:
            wiring.bound[index] = self.buffers.parameter_or_buffer(fqn)
        for index, constant in (*wiring.constants, *wiring.sizes):
            wiring.bound[index] = constant

    def _step_invariants(
        self, wiring: Wiring | None, known: list[tuple[Any, Mapping[str, torch.Tensor]]]
    ) -> Mapping[str, torch.Tensor]:
        """The values that a variant computes once per step; `known`: computations of other variants, with their values."""
        if wiring is None:
            return {}
        found = next((values for computation, values in known if computation == wiring.computation), None)
        if found is None:
            self._bind(wiring)
            arguments, wiring.bound = wiring.bound, []
            names = [role.name for role in wiring.program.outputs if isinstance(role, StepInvariant)]
            found = dict(zip(names, self._hoists[id(wiring)](arguments), strict=True))
            known.append((wiring.computation, found))
        return found

    def end(self) -> None:
        """Drop parameters, inputs and seeds after a step; losses and outputs stay until the next step."""
        self.buffers.parameter_or_buffer = self.buffers.inputs = None
        for wiring in self._wirings():
            wiring.bound = []

    def _distinct(self) -> list[Variant]:
        return list({id(variant): variant for variant in self._variants}.values())

    def _wirings(self) -> list[Wiring]:
        return [wiring for variant in self._distinct() for wiring in variant.wirings.values()]

    def task(self, phase: Phase, microbatch: int, neighbour: GraphStage | None) -> Task:
        """One phase of one microbatch; `neighbour`: the stage that sends its input values, if on this rank."""
        variant, key = self._variants[microbatch], TaskKey(phase, microbatch)
        receive, sink = self._receive(key, neighbour), self.gradient_sink(phase, microbatch)
        task = Task(key, variant.wirings[phase], self.buffers, receive, sink, variant.read_after(phase))
        if self._graphs is not None:
            task.run_program = self._graphs.task(task.program)
        return task

    def gradient_sink(self, phase: Phase, microbatch: int) -> MicrobatchSink | LayerSink | None:
        """The sink that adds a program's gradients to this stage's sums; None for a program without gradients."""
        wiring = self._variants[microbatch].wirings[phase]
        fqns, layers = wiring.gradients, wiring.program.layers
        if layers is not None and self._reducer is not None and fqns:
            made = [[*map(whole_name, each)] for each in layers.gradients]
            return LayerSink(self._reducer, self.gradients, microbatch, fqns, made)
        return MicrobatchSink(self.gradients, microbatch, fqns) if fqns else None

    def saved_values(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The saved values of a microbatch by name. A caller may take values out if it puts them back before they are read."""
        return self.buffers.saved.setdefault(microbatch, {})

    def _receive(self, key: TaskKey, neighbour: GraphStage | None) -> Receive | None:
        """The function that returns the values that cross into this stage; None where no value does."""
        crossing = key.direction, key.microbatch
        if not key.crosses or not 0 <= self.stage_index - _step(key.direction) < self.num_stages:
            return None
        if neighbour is not None:
            return partial(neighbour.buffers.outgoing.pop, crossing)
        wait, received = self._mailbox.wait, self.buffers.received
        return lambda: wait(received.pop(crossing))

    def send_message(self, direction: str, microbatch: int) -> Callable[[], Message]:
        """A function that makes the message with a microbatch's activations (F) or gradients (B) for the next rank."""
        layouts, peer = self._crossing(direction, microbatch, leaving=True)
        crossing, outgoing, pack = (direction, microbatch), self.buffers.outgoing, self._mailbox.outgoing
        graphs, name = self._graphs, f"{self.stage_index}SEND_{direction}{microbatch}"

        def send() -> Message:
            message = pack(outgoing.pop(crossing), layouts, peer, name)
            if graphs is not None:
                message.tensors = graphs.own(message.tensors)  # the transport reads them after later replays
            return message

        return send

    def receive_message(self, direction: str, microbatch: int) -> Callable[[], Message]:
        """A function that allocates a message's receive buffers when it is called."""
        layouts, peer = self._crossing(direction, microbatch, leaving=False)
        crossing, received, allocate = (direction, microbatch), self.buffers.received, self._mailbox.incoming
        name = f"{self.stage_index}RECV_{direction}{microbatch}"

        def receive() -> Message:
            message = received[crossing] = allocate(layouts, peer, name)
            return message

        return receive

    def message_bytes(self, send: Action) -> int:
        """The bytes of the message of a SEND action of this stage, as packed for the wire."""
        layouts, _ = self._crossing("F" if send.kind is Kind.SEND_F else "B", send.microbatch or 0, leaving=True)
        return sum(prod(layout.packed) * layout.dtype.itemsize for layout in layouts)

    def _crossing(self, direction: str, microbatch: int, *, leaving: bool) -> tuple[Sequence[WireLayout], int]:
        """The layouts of the values that leave or enter this stage in one direction, and the peer's rank."""
        variant, upwards = self._variants[microbatch], direction == "F"
        boundary = variant.above if leaving == upwards else variant.below
        beyond = self.stage_index + (_step(direction) if leaving else -_step(direction))
        metas = boundary.forward if upwards else boundary.backward
        return [layout_of(meta) for meta in metas], self._rank_of_stage[beyond]


def _step(direction: str) -> int:
    return 1 if direction == "F" else -1
