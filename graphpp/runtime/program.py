"""Stage programs with named inputs and outputs: the compiler makes them, the runtime runs them.

- A `Program` is a callable and two tuples of roles, one role per argument and one per result. The role says which value it is
  (parameter <fqn>, saved value, gradient of <fqn>); its position has no meaning.
- A `StageProgram` is one stage with all its phases; a `PipelineProgram` is all stages of one captured graph.
- Every rank knows the shapes, dtypes and strides of the values that cross a `Boundary` before the first step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from graphpp._torch.symbols import Values, considering, hint


@dataclass(frozen=True)
class Parameter:
    """The model's parameter under its canonical FQN."""

    fqn: str


@dataclass(frozen=True)
class ParameterRows(Parameter):
    """This rank's rows of a sharded parameter that the program gathers: [elements], padded to as many as the first rank has."""


@dataclass(frozen=True)
class Buffer:
    """The model's buffer under its canonical FQN."""

    fqn: str


@dataclass(frozen=True)
class Constant:
    """A tensor of the model or the loss without an FQN."""

    name: str


@dataclass(frozen=True)
class Input:
    """A tensor of the microbatch, by its path: `args[0]`, `kwargs['mask']`, `target`."""

    path: str


@dataclass(frozen=True)
class Number(Input):
    """A Python number of the microbatch, by its path: 0-dim, int64 or float64, in the host's memory."""


@dataclass(frozen=True)
class Seed:
    """The gradient of the loss with respect to itself: loss scale times 1/microbatches."""


@dataclass(frozen=True)
class RandomKey:
    """The microbatch's key for random numbers, a Python int."""


@dataclass(frozen=True)
class Size:
    """A number computed from sizes of the microbatch's tensors, by its formula, such as `2*s1`; a Python int or float."""

    formula: str


@dataclass(frozen=True)
class Received:
    """A value of the joint graph that arrives from the neighbouring stage."""

    name: str


@dataclass(frozen=True)
class Saved:
    """A value of the joint graph that the forward keeps for a later phase of the same stage and microbatch."""

    name: str


@dataclass(frozen=True)
class Sent:
    """A value of the joint graph that leaves for the neighbouring stage."""

    name: str


@dataclass(frozen=True)
class Loss:
    """The scalar loss of the microbatch."""


@dataclass(frozen=True)
class Output:
    """A tensor leaf of the model's output, by its index among the output's leaves."""

    index: int


@dataclass(frozen=True)
class Metric:
    """A number to be reported, which the loss function returned in addition to the loss: 0-dim, by its name."""

    name: str


@dataclass(frozen=True)
class Gradient:
    """The gradient of the parameter <fqn> for one microbatch, with the parameter's shape."""

    fqn: str


@dataclass(frozen=True)
class BufferUpdate:
    """The new value of the buffer <fqn> after this microbatch."""

    fqn: str


@dataclass(frozen=True)
class StepInvariant:
    """A value of the joint graph that depends on parameters, buffers and constants alone, computed once per step."""

    name: str


InputRole = Parameter | Buffer | Constant | Input | Seed | RandomKey | Size | Received | Saved | StepInvariant
OutputRole = Loss | Output | Metric | Gradient | BufferUpdate | Sent | Saved | StepInvariant


class Phase(StrEnum):
    """Phases by the letters of actions. B does both I and W; HOIST computes the step-invariant values once a step.

    RECOMPUTE computes forward values for B, or I and W, from the values that F saved.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    EVALUATE = "E"
    HOIST = "P"

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def is_backward(self) -> bool:
        return self in (Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)

    @property
    def reads_saved(self) -> bool:
        return self.is_backward or self is Phase.RECOMPUTE


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides (in elements), dtype and `requires_grad` of a value; sizes and strides may be symbolic integers."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def at(self, values: Values) -> TensorMeta:
        """This value with numbers in place of symbolic sizes."""
        return replace(self, shape=tuple(map(values, self.shape)), stride=tuple(map(values, self.stride)))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; symbolic sizes count with the values of the trace."""
        elements: int = math.prod(map(hint, self.shape))
        return elements * self.dtype.itemsize


def total_bytes(values: Iterable[TensorMeta]) -> int:
    return sum(value.nbytes for value in values)


@dataclass(frozen=True)
class Boundary:
    """The values that cross stage|stage+1 for one microbatch: activations forward, gradients backward."""

    stage: int
    forward: tuple[TensorMeta, ...] = ()
    backward: tuple[TensorMeta, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes sent over this boundary in both directions for one microbatch."""
        return total_bytes(self.forward + self.backward)


@dataclass(frozen=True)
class LayerTraffic:
    """The gathers and reductions of a program that gathers sharded parameters one layer at a time (`keep=0`).

    `gathers`: for each gather, the bytes each rank contributes. `whole`: the peak bytes of whole parameters. `gradients`: for
    each sum over the ranks, the FQNs of its gradients; the sum starts once all of them are made. `sums`, `reductions`: bytes of
    each sum's gradients, as made and as sent. `sent`: bytes this rank sends to other ranks (its own share not counted).
    `order`: a line for each gather and sum in starting order, equal on all ranks.
    """

    gathers: tuple[int, ...] = ()
    whole: int = 0
    gradients: tuple[tuple[str, ...], ...] = ()
    sums: tuple[int, ...] = ()
    reductions: tuple[int, ...] = ()
    sent: float = 0.0
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """One phase of one stage. `run(arguments)` takes a list of arguments, empties it, and returns a tuple of results.

    `run(arguments, sink)` calls `sink(index of the result, value)` for each gradient as soon as it is made, and returns the
    sink's answer in its place; a gradient that is another result too is only returned. A `fused` program hands out a gradient
    that is a matrix product by its factors, `sink.matmul(index, a, b)` (`gradients/gradient_sink.py`). Several of its results
    may have one `Gradient` role: the gradient is their sum.
    `source`: the program's Python text. `shared`: indices of results whose memory an input or another result may share; copy
    these before writing to them. `live`: the changes in allocated bytes while the program runs, in order. `sent`: bytes of each
    value for the neighbouring stage that shares no memory with a saved value. `values`: the numbers for symbolic sizes in these
    bytes. `layers`: the program's own gathers and reductions; None if its parameters are whole before it runs.
    """

    stage: int
    phase: Phase
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    run: Callable[..., Sequence[Any]]
    source: str = ""
    shared: frozenset[int] = frozenset()
    live: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    values: Values | None = None
    fused: bool = False
    layers: LayerTraffic | None = None
    has_collectives: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once while the program runs."""
        with considering(self.values):
            return max(itertools.accumulate(map(hint, self.live)), default=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes of values for the neighbouring stage that stay allocated after the program, saved values not counted."""
        with considering(self.values):
            return sum(map(hint, self.sent))


@dataclass(frozen=True)
class WovenProgram:
    """Independent programs, interleaved operation by operation into one.

    `run` takes the arguments of all `parts`, part after part, and returns their results in that order; so do indices to a sink.
    """

    parts: tuple[Program, ...]
    run: Callable[..., Sequence[Any]]
    source: str = ""


@dataclass(frozen=True)
class StageProgram:
    """A stage with all its phases, its parameters and its buffers.

    `parameters`, `buffers`: FQNs that any phase reads, or whose gradient or update it computes. `saved`: the values that the
    forward saves for a microbatch; `saved_memory`: the values that allocated their memory, each once. `kept_memory`: values
    whose memory is alive from I to W; `unread_memory`: the part of them that I neither reads nor makes. `recomputed_memory`,
    `waiting_memory`: the same between R and B or I, where R is the first. `modules`: FQNs of the called modules, for display.
    `hoisted` computes the `StepInvariant` values once, when a step begins.
    """

    index: int
    programs: Mapping[Phase, Program]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    saved: tuple[TensorMeta, ...]
    saved_memory: tuple[TensorMeta, ...] = ()
    kept_memory: tuple[TensorMeta, ...] = ()
    unread_memory: tuple[TensorMeta, ...] = ()
    recomputed_memory: tuple[TensorMeta, ...] = ()
    waiting_memory: tuple[TensorMeta, ...] = ()
    modules: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    hoisted: Program | None = None

    @property
    def saved_bytes(self) -> int:
        return total_bytes(self.saved_memory)

    @property
    def kept_bytes(self) -> int:
        return total_bytes(self.kept_memory)

    def peak_bytes(self, phase: Phase) -> int:
        """The most bytes of one microbatch alive at once while the phase runs."""
        waiting = {Phase.INPUT_GRAD: self.unread_memory, Phase.RECOMPUTE: self.waiting_memory}.get(phase, ())
        return self.programs[phase].peak_bytes + total_bytes(waiting)

    @property
    def inputs(self) -> frozenset[InputRole]:
        items = [*self.programs.values(), *([self.hoisted] if self.hoisted is not None else [])]
        return frozenset(role for item in items for role in item.inputs)

    @property
    def gradients(self) -> tuple[str, ...]:
        roles = [role for item in self.programs.values() for role in item.outputs]
        return tuple(dict.fromkeys(role.fqn for role in roles if isinstance(role, Gradient)))

    @property
    def written_buffers(self) -> tuple[str, ...]:
        """FQNs of the buffers and frozen parameters that the forward writes."""
        roles = [role for item in self.programs.values() for role in item.outputs]
        return tuple(dict.fromkeys(role.fqn for role in roles if isinstance(role, BufferUpdate)))


@dataclass(frozen=True)
class PipelineProgram:
    """All stages of one captured graph and the boundaries between them: `boundaries[s]` is s|s+1.

    `loss` is 0-dim; `metrics` has dtypes by name. `sizes`: the numbers for `Size` inputs, by formula. `values`: the numbers for
    symbolic sizes; None where no size is symbolic, and in programs for all sizes, whose `sizes` are symbolic too. `partial`:
    FQNs of parameters whose gradients are partial on each rank that shares layers.
    """

    stages: tuple[StageProgram, ...]
    boundaries: tuple[Boundary, ...]
    loss: TensorMeta | None = None
    metrics: Mapping[str, torch.dtype] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    values: Values | None = None
    partial: frozenset[str] = frozenset()

    @property
    def gathers_layers(self) -> bool:
        return any(item.layers is not None for stage in self.stages for item in stage.programs.values())

    @property
    def random(self) -> bool:
        programs = [item for stage in self.stages for item in stage.programs.values()]
        return any(RandomKey() in item.inputs for item in programs)
