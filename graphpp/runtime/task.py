"""One phase of one microbatch on one stage: gathers its program's arguments, runs the program, stores the results.

- A task is made once per runner, and resolves everything that is known before the step: `run()` looks nothing up by role, rank
  or phase.
- `OverlappedActions` runs the parts of an OVERLAP_F_B action as one woven program, so that collectives of one part overlap with
  the computation of the other. No part reads a result of another: all arguments are gathered first.
- Values from a stage on the same rank are taken out of that stage's buffers. `arguments` waits for values from another rank,
  right before the program runs. Each value is handed over once, and freed when its last reader has run.
- The program hands gradients to the task's `GradientSink` while it runs; the corresponding results are None. A gradient that is
  another result too is returned, and `file` passes it to the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout
from graphpp.runtime.gradients.gradient_sink import GradientSink
from graphpp.runtime.messages.mailbox import Message
from graphpp.runtime.program import Phase, Program, WovenProgram
from graphpp.runtime.wiring import Wiring
from graphpp.streams import InputCopies

Receive = Callable[[], Sequence[torch.Tensor]]  # the values that cross into the stage, once they have arrived


class TaskGraphs(Protocol):
    """Records the tasks of a runner and replays them (`backends/record_programs.py`)."""

    def task(self, program: Program) -> Callable[..., Sequence[Any]]:
        """A function in place of `program.run` for one task."""

    def owns(self, value: torch.Tensor) -> bool:
        """Whether a later task overwrites a value."""

    def own(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, with copies in place of those that a later task overwrites."""


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a step, by microbatch: tensors by path, the seed of the backward, the key for random numbers.

    `silent`: the microbatches whose gradients do not count.
    """

    tensors: Sequence[Mapping[str, torch.Tensor]]
    seeds: Sequence[torch.Tensor] = ()
    keys: Sequence[int] = ()
    silent: frozenset[int] = frozenset()


@dataclass
class StageBuffers:
    """The values of one stage that are alive during a step, by microbatch, or by (direction F or B, microbatch).

    `copies` copies inputs to the device; `received`: messages from other ranks; `outgoing`: values for neighbouring stages.
    `parameter_or_buffer` gives the model's tensors by FQN; it and `inputs` are None outside a step.
    """

    copies: InputCopies
    parameter_or_buffer: Callable[[str], torch.Tensor] | None = None
    inputs: StepInputs | None = None
    received: dict[tuple[str, int], Message] = field(default_factory=dict)
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    outgoing: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        for values in (self.received, self.saved, self.outgoing, self.losses, self.outputs, self.metrics):
            values.clear()


@dataclass(frozen=True)
class TaskKey:
    phase: Phase
    microbatch: int

    @property
    def direction(self) -> str:
        """The direction in which the results leave the stage: F (to the next stage) or B (to the previous one)."""
        return "B" if self.phase.is_backward else "F"

    @property
    def crosses(self) -> bool:
        """Whether values come from one neighbouring stage, and results go to the other."""
        return self.phase not in (Phase.WEIGHT_GRAD, Phase.RECOMPUTE)


class Task:
    def __init__(
        self,
        key: TaskKey,
        wiring: Wiring,
        buffers: StageBuffers,
        receive: Receive | None,
        sink: GradientSink | None,
        read_later: frozenset[str] = frozenset(),
    ) -> None:
        """`receive`: None if no value arrives. `read_later`: names of saved values that later tasks of the microbatch read."""
        self.key, self.sink = key, sink
        self.program: Program = wiring.program
        self.run_program = wiring.program.run
        self._wiring, self._buffers, self._receive = wiring, buffers, receive
        self._microbatch, self._read_later = key.microbatch, read_later
        self._reads_inputs = bool(wiring.inputs or wiring.numbers or wiring.seeds or wiring.keys)
        self._reads_saved = key.phase.reads_saved
        self._outgoing = (key.direction, key.microbatch) if key.crosses else None

    def run(self) -> None:
        run, sink = self.run_program, self.sink
        self.file(run(self.arguments()) if sink is None else run(self.arguments(), sink))

    def arguments(self) -> list[Any]:
        """The program's arguments, taken out of the stage's buffers; waits for values that have not arrived yet."""
        wiring = self._wiring
        arguments = wiring.bound.copy()
        if self._reads_inputs:
            self._add_inputs(arguments)
        if self._receive is not None:
            tensors = self._receive()
            for index, position in wiring.received:
                arguments[index] = tensors[position]
        if self._reads_saved:
            self._add_saved(arguments)
        return arguments

    def _add_inputs(self, arguments: list[Any]) -> None:
        wiring, inputs, microbatch = self._wiring, self._buffers.inputs, self._microbatch
        assert inputs is not None, "begin() comes first"
        for index, path in wiring.inputs:
            arguments[index] = self._buffers.copies.take(inputs.tensors[microbatch][path])
        for index, path in wiring.numbers:
            arguments[index] = inputs.tensors[microbatch][path]
        for index in wiring.seeds:
            arguments[index] = inputs.seeds[microbatch]
        for index in wiring.keys:
            arguments[index] = inputs.keys[microbatch]

    def _add_saved(self, arguments: list[Any]) -> None:
        saved = self._buffers.saved.pop(self._microbatch, {})
        for index, name in self._wiring.saved:
            arguments[index] = saved[name]
        if self._read_later:
            self._buffers.saved[self._microbatch] = {name: saved[name] for name in self._read_later if name in saved}

    def file(self, results: Sequence[Any]) -> None:
        """Store the results for their readers; the result is None for a gradient that the sink already has."""
        wiring, buffers = self._wiring, self._buffers
        if self.sink is not None:
            for index in wiring.gradients:
                if results[index] is not None:
                    self.sink(index, results[index])
        if not self._reads_saved:
            self._file_forward(results)
        if wiring.keeps:
            saved = {name: results[index] for index, name in wiring.keeps}
            buffers.saved.setdefault(self._microbatch, {}).update(saved)
        if self._outgoing is not None:
            buffers.outgoing[self._outgoing] = [results[index] for index in wiring.sends]

    def _file_forward(self, results: Sequence[torch.Tensor]) -> None:
        wiring, buffers, microbatch = self._wiring, self._buffers, self._microbatch
        for index, fqn in wiring.updates:
            assert buffers.parameter_or_buffer is not None, "begin() comes first"
            buffers.parameter_or_buffer(fqn).copy_(results[index])
        for index in wiring.losses:
            buffers.losses[microbatch] = results[index].clone()  # a loss may be a view of large memory
        if wiring.outputs:
            shared = self.program.shared  # e.g. with a parameter, which may be freed before the output is read
            own = {leaf: results[index].clone() if index in shared else results[index] for index, leaf in wiring.outputs}
            buffers.outputs[microbatch] = own
        if wiring.metrics:
            buffers.metrics[microbatch] = {name: results[index].clone() for index, name in wiring.metrics}


class OverlappedActions:
    """The woven programs of one rank, by the programs of their parts."""

    def __init__(self, woven: Sequence[WovenProgram]) -> None:
        self.woven = tuple(woven)
        self._by_parts = {tuple(map(id, each.parts)): each for each in woven}

    def run(self, parts: Sequence[Task]) -> bool:
        """Run the woven program of these tasks and store its results; returns False, and runs nothing, if there is none."""
        woven = self._by_parts.get(tuple(id(part.program) for part in parts))
        if woven is None:
            return False
        owners = [(part.sink, index) for part in parts for index in range(len(part.program.outputs))]
        arguments = [value for part in parts for value in part.arguments()]
        takes = any(part.sink is not None for part in parts)
        results = woven.run(arguments, WovenSink(owners)) if takes else woven.run(arguments)
        for part in parts:
            count = len(part.program.outputs)
            own, results = results[:count], results[count:]
            part.file(own)
        return True


class WovenSink:
    """Forwards the gradients of a woven program, whose indices count the results of all parts, to the parts' own sinks."""

    def __init__(self, owners: Sequence[tuple[GradientSink | None, int]]) -> None:
        """`owners`: for each result of the woven program, the sink of its part and its index among the part's results."""
        self._owners = owners

    def __call__(self, index: int, value: torch.Tensor) -> None:
        sink, own = self._owner(index)
        sink(own, value)

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        sink, own = self._owner(index)
        sink.matmul(own, a, b, layout)

    def _owner(self, index: int) -> tuple[GradientSink, int]:
        sink, own = self._owners[index]
        assert sink is not None, f"result {index} is no gradient"
        return sink, own
