"""Passes over views: equal views become one node, and no operation depends on strides that the trace predicted.

Both are bit-preserving. `merge_views` merges only nodes of one stage and phase, so that no additional value crosses a boundary.

Contract of `relax_views`: a kernel may return other strides than its fake kernel predicted (BatchNorm of a transposed input on
CPU). Then `view` raises at run time, `as_strided` reads the wrong elements, and dropout, which draws in the order of its
input's memory, drops other elements than on a rank that received the input with the predicted strides. Afterwards:
- every `view` is a `reshape`, which returns the same view where one exists;
- an operation that depends on the memory layout (`as_strided`, a view to another dtype, a collective) gets a contiguous input
  if the traced input was contiguous;
- an operation that draws a random number for each element of its one tensor input gets the input with its dimensions in the
  traced order of memory. An input with gaps or repeated elements stays unchanged.
Nothing is copied if a kernel returns the predicted strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor, remove_unused
from graphpp.runtime.random_keys import seeded

aten = torch.ops.aten
_RESHAPING = (aten.view.default, aten._unsafe_view.default)
_BY_LAYOUT = {aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default}


def merge_views(joint: JointGraph) -> JointGraph:
    """Merge equal views and chains of `view`, in place; nodes need `meta["stage"]`."""
    views: dict[Any, fx.Node] = {}
    for node in joint.computed():
        if not is_view(node) and node.target not in _RESHAPING:
            continue
        source = node.args[0]
        if _is_chain(node) and isinstance(source, fx.Node):
            node.args = (source.args[0], *node.args[1:])
            node.target = aten.view.default
        first = views.setdefault((_place(node), node.target, _key(node.args), _key(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
    remove_unused(joint.graph)
    return joint


def _place(node: fx.Node) -> tuple[Any, bool]:
    return node.meta["stage"], node.meta["backward"]


def _is_chain(node: fx.Node) -> bool:
    source = node.args[0]
    if node.target not in _RESHAPING or not isinstance(source, fx.Node) or source.target not in _RESHAPING:
        return False
    return _place(source) == _place(node)


def _key(value: Any) -> Any:
    """Arguments in a hashable form with types: 1, 1.0 and True compare equal, but must not be merged."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    return (type(value).__name__, value)


def relax_views(joint: JointGraph) -> JointGraph:
    for node in list(joint.computed()):
        if node.target in _RESHAPING:
            node.target = aten.reshape.default
        elif node.target in _BY_LAYOUT or is_collective(node):
            for source in filter(is_tensor, node.all_input_nodes):
                value = source.meta["val"]
                if value.is_contiguous() and not value.storage_offset():
                    _order_input(joint.graph, node, source, range(value.dim()))
        elif node.target is seeded:
            sources = list(filter(is_tensor, node.all_input_nodes))
            order = memory_order(sources[0].meta["val"]) if len(sources) == 1 else None  # attention draws by position
            if order is not None:
                _order_input(joint.graph, node, sources[0], order)
    return joint


def memory_order(value: torch.Tensor) -> Sequence[int] | None:
    """The dimensions from the largest stride to the smallest; None for a value with gaps or repeated elements."""
    if value.is_contiguous():
        return range(value.dim())
    sizes, strides = value.shape, value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    return order if value.permute(order).is_contiguous() else None


def _order_input(graph: fx.Graph, node: fx.Node, source: fx.Node, order: Sequence[int]) -> None:
    """Let `node` read `source` with its dimensions in this memory order, from the largest stride to the smallest."""
    if source.op == "placeholder":
        return
    inverse = sorted(range(len(order)), key=order.__getitem__)
    contiguous: tuple[Any, ...] = (aten.contiguous.default,)
    turned = inverse != sorted(inverse)
    steps = [(aten.permute.default, list(order)), contiguous, (aten.permute.default, inverse)] if turned else [contiguous]
    ordered = source
    with graph.inserting_before(node):
        for target, *dims in steps:
            value = target(ordered.meta["val"], *dims)
            ordered = graph.call_function(target, (ordered, *dims))
            ordered.meta = {**node.meta, "val": value}
    node.replace_input_with(source, ordered)
