"""Derive how tensor parallelism divides the values of a graph, from the sharded dimensions of its parameters.

Contract
    in   a joint graph whose nodes have the meta "rows" of `facts.py`; the sharded dimension of parameters; the operations whose
         results are gathered
    out  `Sharding`. `of[node]`: 1 for each dimension of the value that ranks divide; `flops[node]`: 1 if ranks divide the
         operation's FLOPs; `exchanges[node]`: (kind, value) of the collectives at a node. The graph is not changed

Each operator runs once on fake tensors whose sharded dimensions are doubled; the doubled dimensions of the result are sharded.
Where a sharded dimension vanishes (a contraction, a sum), each rank has a partial sum, which needs an all-reduce. If one
operand is whole and the other sharded, the whole one is sliced without an exchange. If the operator still fails, its operands
are gathered. Sizes that are plain numbers in the graph (`view`, `expand`, `slice`) follow from the operand, or from the forward
operation whose backward the node is.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp.cluster_planner.costs.dims import (
    Dims,
    Powers,
    called,
    growing_sizes,
    grows,
    name_of,
    power_of,
    powers_of,
    shape_of,
    twice,
    unchanged,
)
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import flops

VIEWS = ("view", "_unsafe_view", "reshape")
_OF_FORWARD = (  # results of plain sizes, equal to those of a forward value
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "zeros", "ones", "empty", "full", "arange", "rand",
    "randn", "embedding_dense_backward", "scalar_tensor", "select_backward",
)  # fmt: skip
_BY_PLACE = (  # each dimension of the result is the operand's dimension at the same place
    "slice", "slice_scatter", "slice_backward", "split", "split_with_sizes", "unsafe_split", "as_strided", "sum_to_size",
)  # fmt: skip
_KEEPING = (  # results in which a sharded dimension vanishes without a sum
    *_OF_FORWARD, "select", "slice", "index", "gather", "zeros_like", "ones_like", "full_like", "empty_like", "argmax", "topk",
)  # fmt: skip
_SHARED_ROWS = ("_softmax", "_log_softmax")  # over a sharded dimension, ranks exchange the maximum and the sum of each row
_UNFIT = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)  # torch's errors for operands of mismatched shapes

Sources = Mapping[fx.Node, Powers]


class Sharding:
    def __init__(self, joint: JointGraph, parameters: Mapping[fx.Node, Dims], gathered: Set[fx.Node]) -> None:
        self.of: dict[fx.Node, Powers] = {}
        self.flops: dict[fx.Node, int] = {}
        self.exchanges: dict[fx.Node, list[tuple[str, fx.Node]]] = defaultdict(list)
        self._gathered, self._mode = gathered, aot.fake_mode()
        self._forward: dict[int, list[fx.Node]] = defaultdict(list)  # by autograd's sequence number
        self._whole: dict[int, tuple[Dims, Dims]] = {}  # by sequence number: shape and division of a gathered value
        self._known: dict[Any, tuple[Powers, int]] = {}
        sharded = [(node.meta["val"], dims) for node, dims in parameters.items()]
        self._sizes = {size for value, dims in sharded for size in growing_sizes(value, dims)}
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = parameters.get(node) or unchanged(node.meta["val"])
            elif node.op != "output":
                if not node.meta["backward"]:
                    self._forward[node.meta["seq"]].append(node)
                self._enter(node)

    def _enter(self, node: fx.Node) -> None:
        grown = {source: self._operand(node, source) for source in node.all_input_nodes}
        if node.target is operator.getitem:
            self.of[node] = grown[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        found = self._found(node, grown) if any(map(grows, grown.values())) else unchanged(node.meta["val"])
        if found is None:
            self.exchanges[node] += [("all_gather", source) for source in grown if grows(grown[source])]
            found = unchanged(node.meta["val"])
        if node in self._gathered and grows(found):
            self.exchanges[node].append(("all_gather", node))
            self._whole[node.meta["seq"]] = shape_of(node.meta["val"]), found
            found = unchanged(node.meta["val"])
        self.of[node] = found

    def _operand(self, node: fx.Node, source: fx.Node) -> Powers:
        """The division of an operand. In the backward of a gathered value, each rank takes its part of the gradient."""
        shape, dims = self._whole.get(node.meta["seq"], ((), ())) if node.meta["backward"] else ((), ())
        of_whole = bool(shape) and isinstance(source.meta["val"], torch.Tensor) and shape_of(source.meta["val"]) == shape
        return dims if of_whole else self.of[source]

    def _found(self, node: fx.Node, grown: Sources) -> Powers | None:
        """The division of a result, with whole or sliced operands; None if the operator accepts no sharded operands."""
        sizes = self._sizes.union(*(growing_sizes(source.meta["val"], powers) for source, powers in grown.items()))
        for operands in (grown, *_cut(grown, sizes)):
            try:
                found, divided = self._once(node, operands)
            except _UNFIT:
                continue
            if divided:
                self.flops[node] = divided
            self._note_sums(node, operands, found)
            return found
        return None

    def _once(self, node: fx.Node, grown: Sources) -> tuple[Powers, int]:
        """The division of a result and of the FLOPs; equal calls run once."""
        twin = self._twin(node)
        key = node.target, twin, repr(fx.node.map_arg((node.args, node.kwargs), lambda each: (_layout(each), grown[each])))
        if key not in self._known:
            self._known[key] = self._run(node, grown, twin)
        return self._known[key]

    def _run(self, node: fx.Node, grown: Sources, twin: Dims | None) -> tuple[Powers, int]:
        name, value = name_of(node), node.meta["val"]
        if name in _OF_FORWARD:
            return twin or unchanged(value), 0
        if name in (*VIEWS, "expand", *_BY_PLACE):
            source = next(source for source in grown if grows(grown[source]))
            before, dims = shape_of(source.meta["val"]), grown[source]
            if name in _BY_PLACE:
                return _by_place(value, dims), 0
            if name == "expand":
                return _expanded(before, dims, shape_of(value), twin), 0
            return _viewed(before, dims, shape_of(value), twin, node.meta["rows"]), 0
        target, args = called(node)
        with self._mode, _quiet():
            made = {source: twice(source.meta["val"], powers) for source, powers in grown.items()}
            result = target(*fx.node.map_arg(args, made.__getitem__), **fx.node.map_arg(node.kwargs, made.__getitem__))
            return powers_of(value, result), power_of(flops(node), flops(node, made, result))

    def _twin(self, node: fx.Node) -> Dims | None:
        """The division of the forward operation's value that has this gradient's shape; None if there is no such value."""
        value = node.meta["val"]
        if not node.meta["backward"] or not isinstance(value, torch.Tensor):
            return None
        for other in self._forward.get(node.meta["seq"], ()):
            for each in (*other.all_input_nodes, other):
                own = each.meta["val"]
                if isinstance(own, torch.Tensor) and shape_of(own) == shape_of(value) and grows(self.of.get(each, ())):
                    return self.of[each]  # type: ignore[no-any-return]
        return None

    def _note_sums(self, node: fx.Node, grown: Sources, found: Powers) -> None:
        """Record the exchange at an operation where a sharded dimension vanishes."""
        name = name_of(node)
        if name in _SHARED_ROWS and grown[node.all_input_nodes[0]][node.args[1]]:
            self.exchanges[node] += [("rows", node), ("rows", node)]
        elif not grows(found[:1] if name == "convolution_backward" else found) and not name.startswith(_KEEPING):
            self.exchanges[node].append(("all_reduce", node))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of failed operators on fake tensors, since failures are expected here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _layout(node: fx.Node) -> Any:
    value = node.meta["val"]
    return (shape_of(value), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else unchanged(value)


def _cut(grown: Sources, sizes: Set[int]) -> Iterator[Sources]:
    """Operand sets in which one whole operand is sliced at a dimension whose size is sharded elsewhere."""
    for source, powers in grown.items():
        if isinstance(source.meta["val"], torch.Tensor) and not grows(powers):
            shape = shape_of(source.meta["val"])
            for at in (at for at, size in enumerate(shape) if size in sizes):
                yield {**grown, source: tuple(int(index == at) for index in range(len(shape)))}


def _by_place(value: Any, dims: Dims) -> Powers:
    if isinstance(value, tuple | list):
        return tuple(_by_place(each, dims) for each in value)
    more = value.dim() - len(dims)
    aligned = (0,) * more + dims[max(-more, 0) :]
    return tuple(power if size > 1 else 0 for size, power in zip(shape_of(value), aligned, strict=True))


def _expanded(before: Dims, dims: Dims, after: Dims, twin: Dims | None) -> Dims:
    more = len(after) - len(before)
    kept = {at + more: power for at, power in enumerate(dims) if before[at] == after[at + more]}
    return tuple(kept.get(at, twin[at] if twin else 0) for at in range(len(after)))


def _viewed(before: Dims, dims: Dims, after: Dims, twin: Dims | None, rows: Dims) -> Dims:
    """The division after a view. Of a split dimension, the first part is sharded that does not count rows (`rows`: by what
    power of the rows each part grows)."""
    if twin is not None and sum(twin) == sum(dims):
        return twin
    found, left, right = [0] * len(after), 0, 0
    while left < len(before) or right < len(after):
        first, other = left, right
        left, right = min(left + 1, len(before)), min(right + 1, len(after))
        while prod(before[first:left]) != prod(after[other:right]):
            if prod(before[first:left]) < prod(after[other:right]):
                left += 1
            else:
                right += 1
        for at in range(first, left):
            if dims[at]:
                place = _place(prod(before[first:at]), after[other:right])
                found[next((part for part in range(other + place, right) if not rows[part]), other + place)] += dims[at]
    return tuple(found)


def _place(outer: int, after: Sequence[int]) -> int:
    """The index of the group's dimension that begins after `outer` elements of leading dimensions."""
    seen = 1
    for at, size in enumerate(after):
        if seen * size > outer:
            return at
        seen *= size
    return max(len(after) - 1, 0)
