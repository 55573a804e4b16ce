"""Stage programs with named inputs and outputs: the format in which the compiler hands its work to the runtime.

Contract
--------
- A `Program` is a callable and two tuples of roles, one role per argument and one per result. The role says which value it is
  (parameter <fqn>, saved value, gradient of <fqn>); its position has no meaning.
- A `StageProgram` is one stage with all its phases; a `PipelineProgram` is all stages of one captured graph.
- A `Boundary` lists the values that cross s|s+1 in each direction. Their shapes, dtypes and strides are known on every rank
  before the first step.
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
    """A tensor that the model or the loss holds without an FQN."""

    name: str


@dataclass(frozen=True)
class Input:
    """A tensor of the microbatch, by its path: `args[0]`, `kwargs['mask']`, `target`."""

    path: str


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
    """The phases of a stage; the values are the letters of torch's actions (E: evaluation forward). B does both I and W.

    HOIST is no action of a schedule: it computes the stage's step-invariant values, once, when a step begins.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    EVALUATE = "E"
    HOIST = "P"

    @property
    def label(self) -> str:
        """The phase in titles, file names and messages: `forward`, `weight_grad`."""
        return self.name.lower()

    @property
    def is_backward(self) -> bool:
        """Whether the phase computes gradients."""
        return self in (Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides (elements), dtype and needs-grad of a value that crosses a boundary or is saved.

    In the programs of a graph for several sizes, sizes and strides may be symbolic integers, which torch types as integers too.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def at(self, values: Values) -> TensorMeta:
        """The same with numbers for symbolic sizes."""
        return replace(self, shape=tuple(map(values, self.shape)), stride=tuple(map(values, self.stride)))

    @property
    def nbytes(self) -> int:
        """Bytes of the value's elements; with symbolic sizes, for the sizes of the trace."""
        elements: int = math.prod(map(hint, self.shape))
        return elements * self.dtype.itemsize


def total_bytes(values: Iterable[TensorMeta]) -> int:
    """Bytes of several values."""
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
    """The gathers and reductions of a program whose parameters are sharded, and whole one layer at a time (`keep=0`).

    `gathers`: for each gather the bytes that every rank gives; `whole`: the most bytes of whole parameters alive at once.
    `gradients`: the FQNs of the gradients that are summed over the ranks together, once the program has made all of them;
    `sums`, `reductions`: for each such sum the bytes of the gradients, as they are made and as they are sent. `sent`: bytes
    this rank sends to other ranks (its own share not counted). `order`: a line for each gather and each sum, in the order in
    which the program starts them, which all ranks must have alike.
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

    `run(arguments, sink)` hands each gradient to `sink(position among the results, value)` as soon as it is made, and has the
    sink's answer in its place among the results; a gradient that is another result too is only returned. A `fused` program
    hands gradients that are matrix products to `sink.matmul(position, a, b)` by their factors (`gradients/gradient_sink.py`),
    and may have several results with one `Gradient` role: their sum is the gradient.

    `source`: the program's Python text. `shared`: positions of results whose memory an input or another result may share; copy
    these before writing to them. `live`: by how many bytes the memory grows or shrinks, in order, while the program runs, of
    values that arrived, were saved, or are made; `sent`: the bytes of each value for the neighbouring stage that shares no
    memory with a saved one; `values`: the numbers for symbolic sizes among these bytes. `layers`: the program's own gathers and
    reductions; None where its parameters are whole before it runs. `has_collectives`: whether ranks exchange values meanwhile.
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
        """The bytes of values for the neighbouring stage that stay when the program has ended, beside its saved values."""
        with considering(self.values):
            return sum(map(hint, self.sent))


@dataclass(frozen=True)
class WovenProgram:
    """Programs that do not depend on each other, interleaved operation by operation into one.

    `run(arguments)` takes the arguments of all `parts`, part after part, and returns their results in the same order. `run(
    arguments, sink)` hands out gradients as a `Program` does; positions count the results of all parts.
    """

    parts: tuple[Program, ...]
    run: Callable[..., Sequence[Any]]
    source: str = ""


@dataclass(frozen=True)
class StageProgram:
    """A stage with all its phases, its parameters and its buffers.

    `parameters`, `buffers`: FQNs that any phase reads, or whose gradient or update it computes.
    `saved`: the values that the forward saves for a microbatch; `saved_memory`: the values that allocated their memory, each
    once; `kept_memory`: those whose memory is alive from I to W; `unread_memory`: those of them that I neither reads nor makes.
    `modules`: FQNs of the modules called in the stage, for display.
    `hoisted`: computes the `StepInvariant` values that the phases read; runs once, when a step begins.
    """

    index: int
    programs: Mapping[Phase, Program]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    saved: tuple[TensorMeta, ...]
    saved_memory: tuple[TensorMeta, ...] = ()
    kept_memory: tuple[TensorMeta, ...] = ()
    unread_memory: tuple[TensorMeta, ...] = ()
    modules: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    hoisted: Program | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward of one microbatch saves, views of one memory counted once."""
        return total_bytes(self.saved_memory)

    @property
    def kept_bytes(self) -> int:
        """The part of the saved bytes, or of bytes that I makes, that is alive from I to W."""
        return total_bytes(self.kept_memory)

    def peak_bytes(self, phase: Phase) -> int:
        """The most bytes of a microbatch alive at once while a phase runs."""
        waiting = total_bytes(self.unread_memory) if phase is Phase.INPUT_GRAD else 0
        return self.programs[phase].peak_bytes + waiting

    @property
    def inputs(self) -> frozenset[InputRole]:
        """The roles that any phase reads, HOIST included."""
        items = [*self.programs.values(), *([self.hoisted] if self.hoisted is not None else [])]
        return frozenset(role for item in items for role in item.inputs)

    @property
    def gradients(self) -> tuple[str, ...]:
        """FQNs of the parameters whose gradients this stage makes or contributes to."""
        roles = [role for item in self.programs.values() for role in item.outputs]
        return tuple(dict.fromkeys(role.fqn for role in roles if isinstance(role, Gradient)))

    @property
    def written_buffers(self) -> tuple[str, ...]:
        """FQNs of the buffers, and of the frozen parameters, that the forward writes."""
        roles = [role for item in self.programs.values() for role in item.outputs]
        return tuple(dict.fromkeys(role.fqn for role in roles if isinstance(role, BufferUpdate)))


@dataclass(frozen=True)
class PipelineProgram:
    """All stages of one captured graph and the boundaries between them: `boundaries[s]` is s|s+1.

    The last stage computes the loss (0-dim), the outputs and the metrics; `metrics` has their dtypes by name. `sizes`: the
    numbers for the programs' `Size` inputs, by formula. `values`: the sizes of the microbatches that the programs serve; None
    where no size is symbolic, and in programs for all sizes, whose `sizes` are symbolic too. `partial`: the FQNs of parameters
    of whose gradients each rank that shares layers computes a part.
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
        """Whether the programs gather the parameters of one layer at a time."""
        return any(item.layers is not None for stage in self.stages for item in stage.programs.values())

    @property
    def random(self) -> bool:
        """Whether any stage draws random numbers."""
        programs = [item for stage in self.stages for item in stage.programs.values()]
        return any(RandomKey() in item.inputs for item in programs)
