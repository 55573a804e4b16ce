"""The costs of a model as data: by segment the operations of each phase, the bytes, and the parameters. No graph is held.

Contract: sizes are those of `ModelCosts.rows` rows on one rank, with the powers by which they grow and shrink
(`operations.py`); `Degrees` gives the amounts of one rank for any rows and degrees of parallelism. A segment lies between
neighbouring places at which a stage may start; equal segments are one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from graphpp.cluster_planner.costs.operations import Counted, Size
from graphpp.runtime.program import Phase
from graphpp.schedules.table.actions import Kind

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)


@dataclass(frozen=True)
class Degrees:
    """`factor`: rows of a microbatch, as a multiple of the captured ones; ranks of tensor, expert and context parallelism."""

    factor: float
    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence: bool = True

    def amount(self, size: Size, whole: bool = False) -> float:
        """The bytes or FLOPs of one rank; `whole`: of all ranks of tensor parallelism together."""
        total = 0.0
        for rows, sharded, experts, captured in size:
            ranks = self.tp**sharded * self.ep**experts
            if rows:
                ranks *= self.cp * (self.tp if self.sequence and not sharded and not whole else 1)
            total += captured * self.factor**rows / ranks
        return total


@dataclass(frozen=True)
class OffloadableSize:
    """A saved value that may wait in the host's memory: its memory, and the kinds of backward that read it.

    `received`: the segment before made it; `sent`: the segment behind reads it. Such a value stays on the device where that
    segment belongs to another stage of the same rank.
    """

    nbytes: Size
    readers: tuple[Kind, ...]
    received: bool = False
    sent: bool = False


@dataclass(frozen=True)
class SegmentKind:
    """Equal segments. By phase in the order of `PHASES`: `operations`, and `peaks`, the sizes of which the largest is the peak.

    `read`: the parameters that it reads, `made`: the gradients that it makes. `saved`: bytes from forward to backward; `kept`:
    from I to W. `offloadable`: the saved values that may wait in the host's memory.
    """

    operations: tuple[Counted, ...]
    peaks: tuple[tuple[Size, ...], ...]
    read: tuple[Size, ...]
    made: tuple[Size, ...]
    saved: Size
    kept: Size
    offloadable: tuple[OffloadableSize, ...] = ()


@dataclass(frozen=True)
class Variant:
    """The segments under one kind of recomputation: the distinct kinds, and the kind of each segment."""

    kinds: tuple[SegmentKind, ...]
    kind_of: tuple[int, ...]


@dataclass(frozen=True)
class ParameterCosts:
    """A parameter: elements of the whole, dtype, the segments that read it and make gradients of it.

    `sharded`: whether tensor parallelism divides it; `expert`: whether it belongs to experts.
    """

    fqn: str
    elements: int
    dtype: str
    itemsize: int
    readers: tuple[int, ...]
    makers: tuple[int, ...]
    sharded: bool = False
    expert: bool = False


@dataclass(frozen=True)
class ModelCosts:
    """A model's costs. Sizes are those of `rows` rows.

    `starts`: the first operation of each segment; `names`: the module call there; `layers`: the segments at which repeated
    layers start. `variants`: by recomputation. `forward`, `backward`: bytes over the boundary behind each segment but the last.
    `buffers`: (bytes, segments that read them). `attentions`: fused attentions in a forward, for context parallelism.
    `tensor_ranks`, `expert_ranks`: the largest number of ranks that divides all sharded sizes, or the experts of all layers;
    its divisors do as well. 0: there are none. `param_dtype`: the dtype that the capture was given (None: none); `tokens`: of a
    row of the example (0: it has none).
    """

    rows: int
    starts: tuple[int, ...]
    names: tuple[str, ...]
    layers: tuple[int, ...]
    variants: Mapping[str | None, Variant]
    forward: tuple[Size, ...]
    backward: tuple[Size, ...]
    parameters: tuple[ParameterCosts, ...]
    buffers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    attentions: int = 0
    tensor_ranks: int = 0
    expert_ranks: int = 0
    param_dtype: str | None = None
    tokens: int = 0

    @property
    def elements(self) -> int:
        """The elements of all parameters."""
        return sum(each.elements for each in self.parameters)

    @property
    def dtype(self) -> str:
        """The dtype of most elements of the parameters."""
        elements = Counter[str]()
        for each in self.parameters:
            elements[each.dtype] += each.elements
        return max(elements, key=elements.__getitem__, default="float32")
