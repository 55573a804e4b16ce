"""The state of a model by segments: parameters, gradients, optimizer, buffers, casts of weights to float8.

Elements are of one rank after tensor and expert parallelism, before sharding. Whole parameters have the graph's dtype. Gradient
sums, shards and optimizer values are float32 if the capture was given a `param_dtype` (mixed precision), else they have the
parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpp.cluster_planner.costs.model_costs import Degrees, ModelCosts
from graphpp.options.memory import Memory
from graphpp.schedules.table.state_bytes import StateBytes

_MASTER = 4  # bytes of a float32 element, in mixed precision


def state_of_segments(
    costs: ModelCosts, degrees: Degrees, memory: Memory, width: int | None = None, narrow: bool = False, in_place: bool = False
) -> tuple[tuple[StateBytes, ...], tuple[bool, ...]]:
    """One rank's state, and whether each piece belongs to experts. `width`: bytes of an element of a gradient that adds up
    and is sent (None: as those of shards); `narrow`: weights are whole in float8 alone; `in_place`: shards have no gradients of
    their own."""
    elements: dict[_Key, int] = {}
    mixed = costs.param_dtype is not None
    for each in costs.parameters:
        key = _Key(each.readers, each.makers, each.expert, 1 if narrow and mixed and each.float8 else each.itemsize)
        ranks = degrees.parts(each.sharded, each.expert)
        elements[key] = elements.get(key, 0) + -(-each.elements // ranks)
    state = [_piece(key, count, _MASTER if mixed else key.itemsize, memory, width, in_place) for key, count in elements.items()]
    state += [StateBytes(readers, buffers=nbytes) for nbytes, readers in costs.buffers]
    second = 0.5 if narrow else 1.0  # of the casts in two orders, the first one is the weights
    state += [StateBytes((at,), derived=round(second * degrees.amount(size))) for at, size in enumerate(costs.derived) if size]
    return tuple(state), (*(key.expert for key in elements), *[False] * (len(state) - len(elements)))


@dataclass(frozen=True)
class _Key:
    readers: tuple[int, ...]
    makers: tuple[int, ...]
    expert: bool
    itemsize: int


def _piece(key: _Key, elements: int, master: int, memory: Memory, width: int | None, in_place: bool) -> StateBytes:
    """`master`: bytes per element of shards, gradient sums and optimizer values."""
    rows, optimizer, sums = elements * master, memory.optimizer_bytes(elements, master), elements * (width or master)
    trained: Mapping[str, int] = (
        {"sums": sums, "optimizer": optimizer, "row_sums": 0 if in_place else rows, "sent": sums}
        if key.makers
        else {"row_sums": 0, "sent": 0}
    )
    return StateBytes(key.readers, key.makers, weights=elements * key.itemsize, rows=rows, **trained)
