"""The costs of a model as data, without graphs: operations and bytes by segment, and the parameters.

Sizes are of `ModelCosts.rows` rows on one rank, with the powers by which they scale (`operations.py`); `Degrees` scales them to
any rows and degrees of parallelism. Equal segments share one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from graphpp.cluster_planner.costs.operations import Counted, Size
from graphpp.runtime.program import Phase
from graphpp.schedules.table.actions import Kind

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)


@dataclass(frozen=True)
class Degrees:
    """`factor`: rows of a microbatch over captured rows; `tp`, `ep`, `cp`: tensor-, expert- and context-parallel ranks;
    `folded`: experts are spread over all of these ranks, and none is divided."""

    factor: float
    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence: bool = True
    folded: bool = False

    @property
    def expert_ranks(self) -> int:
        return self.ep * (self.cp * self.tp if self.folded else 1)

    def parts(self, sharded: int, experts: int) -> int:
        """The ranks that divide a parameter; powers of the tensor- and expert-parallel ranks."""
        found: int = self.expert_ranks**experts if self.folded and experts else self.tp**sharded * self.ep**experts
        return found

    def amount(self, size: Size, whole: bool = False) -> float:
        """Bytes or FLOPs of one rank; `whole`: not divided by `tp` through sequence parallelism."""
        total = 0.0
        for rows, sharded, experts, captured in size:
            ranks = self.parts(sharded, experts)
            if rows:
                ranks *= self.cp * (self.tp if self.sequence and not sharded and not whole else 1)
            total += captured * self.factor**rows / ranks
        return total


@dataclass(frozen=True)
class OffloadableSize:
    """A saved value that may move to host memory, and the kinds of backward that read it. `received`: the previous segment made
    it; `sent`: the next segment reads it. Such a value stays on the device if that segment is in another stage of the same
    rank."""

    nbytes: Size
    readers: tuple[Kind, ...]
    received: bool = False
    sent: bool = False


@dataclass(frozen=True)
class SegmentKind:
    """Equal segments. `operations`, `peaks`, `read`, `made`: by phase, in the order of `PHASES`. The largest of `peaks` is the
    peak; `read`: parameters, `made`: gradients; `saved`: bytes from forward to backward; `kept`: bytes from I to W;
    `operands`: bytes that products of the forward read and that are not saved, as they are computed again."""

    operations: tuple[Counted, ...]
    peaks: tuple[tuple[Size, ...], ...]
    read: tuple[Size, ...]
    made: tuple[Size, ...]
    saved: Size
    kept: Size
    offloadable: tuple[OffloadableSize, ...] = ()
    operands: Size = ()


@dataclass(frozen=True)
class Variant:
    kinds: tuple[SegmentKind, ...]
    kind_of: tuple[int, ...]


@dataclass(frozen=True)
class ParameterCosts:
    """A whole parameter, and the segments that read it and make gradients of it. `sharded`: tensor parallelism divides it;
    `float8`: its products are in float8."""

    fqn: str
    elements: int
    dtype: str
    itemsize: int
    readers: tuple[int, ...]
    makers: tuple[int, ...]
    sharded: bool = False
    expert: bool = False
    float8: bool = False


@dataclass(frozen=True)
class ModelCosts:
    """A model's costs. Sizes are of `rows` rows.

    `starts`: first operation of each segment; `names`: the module call there; `layers`: the segments at which repeated layers
    start. `variants`: by recomputation. `forward`, `backward`: bytes over the boundary after each segment but the last.
    `buffers`: (bytes, segments that read them). `derived`: by segment, bytes of values of parameters that are computed once per
    step where whole stages are kept, such as weights in float8 (empty: none). `attentions`: fused attentions in a forward, for
    context parallelism.
    `tensor_ranks`, `expert_ranks`: the most ranks that divide all sharded sizes, or the experts of all layers; divisors are
    also allowed; 0: none. `param_dtype`: dtype given to the capture (None: none); `tokens`: per row of the example (0: none);
    `float8`: the linear layers that compute in float8, as text (None: none). `head`: FQN of the weight of the linear
    layer before the only cross entropy (None: none).
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
    derived: tuple[Size, ...] = ()
    attentions: int = 0
    tensor_ranks: int = 0
    expert_ranks: int = 0
    param_dtype: str | None = None
    tokens: int = 0
    float8: str | None = None
    head: str | None = None

    @property
    def elements(self) -> int:
        return sum(each.elements for each in self.parameters)

    @cached_property
    def has_head(self) -> bool:
        """Whether the head is the last segment, and a tied embedding the first."""
        weight = next((each for each in self.parameters if each.fqn == self.head), None)
        last = len(self.starts) - 1
        return weight is not None and last > 0 and set(weight.readers) in ({last}, {0, last})

    @cached_property
    def ties_head(self) -> bool:
        """Whether the first segment reads the head's weight, as a tied embedding does."""
        return any(each.fqn == self.head and each.readers[0] == 0 for each in self.parameters)

    @cached_property
    def dtype(self) -> str:
        """The dtype of most parameter elements."""
        elements = Counter[str]()
        for each in self.parameters:
            elements[each.dtype] += each.elements
        return max(elements, key=elements.__getitem__, default="float32")
