"""Whether a graph with symbolic sizes computes the same as the graph of one microbatch at that microbatch's sizes.

Code that checks types, prints a size or catches the error of an unhashable symbol may branch differently for symbols, without
a guard. Contract: `difference` of the operations of two graphs is None only if both have the same operations equally often:
operators, numbers, shapes and dtypes of arguments and results. Views are ignored, since a trace with symbols keeps views that
do nothing, and so are operations without a use. Operations that compute a number are ignored too, since the number is
compared where an operation reads it. A size that a number of the microbatch decides equals no other.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import SYMBOLIC, Values, formula, is_unknown, symbols_in
from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.joint_graph import JointGraph, describe_node, is_check

aten = torch.ops.aten
_START = 3  # the place of the start in aten.slice_scatter
_NO_WORK = {operator.getitem, aten._unsafe_view.default, aten.lift_fresh_copy.default, aten.clone.default}


Operations = Mapping[str, tuple[int, str]]
"""By the facts of an operation: how often a graph has the operation, and the operator with its place in the user's code."""


def difference(found: Operations, expected: Operations) -> str | None:
    """The operator and place of an operation that one graph has more often than the other."""
    for key in (*found, *expected):
        (one, place), (other, there) = found.get(key, (0, "")), expected.get(key, (0, ""))
        if one != other:
            return place or there
    return None


def operations_of(joint: JointGraph, values: Values) -> Operations:
    """The operations of a graph; `values`: the numbers for its symbols."""
    found: dict[str, tuple[int, str]] = {}
    needed = _needed(joint.graph)
    for node in filter(needed.__contains__, joint.computed()):
        number = isinstance(node.meta["val"], (*SYMBOLIC, int, float)) or is_check(node)
        works = node.target not in _NO_WORK and not number and not is_view(node) and not _is_of_whole_slice(node, values)
        if node.op == "call_function" and works:
            given, made = [_arguments(node), node.kwargs], node.meta["val"]
            key = repr([str(node.target), _described(given, values), _described(made, values)])
            times, place = found.get(key) or (0, f"{node.target} at {describe_node(node)}")
            found[key] = times + 1, place
    return found


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that an output or an operation with an effect needs; a trace with symbols lacks others."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        if node in found or node.op == "output" or (node.is_impure() and not is_check(node)):
            found.update((node, *node.all_input_nodes))
    return found


def _arguments(node: fx.Node) -> Sequence[Any]:
    """The arguments, with 0 for the start of a slice that begins at None."""
    starts = node.target == aten.slice_scatter.default
    return [0 if starts and at == _START and each is None else each for at, each in enumerate(node.args)]


def _is_of_whole_slice(node: fx.Node, values: Values) -> bool:
    """Whether a node is the backward of, or an assignment to, a slice that is all of `x` at these sizes: it does nothing."""
    places = {aten.slice_backward.default: 0, aten.slice_scatter.default: 1}
    if node.target not in places:
        return False
    part: Any = node.args[places[node.target]]
    return bool(_described(part, values) == _described(node, values))


def _described(value: Any, values: Values) -> Any:
    """A number, or the shape and dtype of a tensor, also in nested values."""
    if isinstance(value, fx.Node):
        return _described(value.meta.get("val"), values)
    if isinstance(value, SYMBOLIC):
        return values(value) if symbols_in(value) <= values.of_symbols.keys() else str(formula(value))
    if isinstance(value, torch.Tensor):
        sizes = [str(formula(size)) if is_unknown(size) else _described(size, values) for size in value.shape]
        return sizes, str(value.dtype)
    if isinstance(value, dict):
        return {key: _described(each, values) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each, values) for each in value]
    return value if isinstance(value, int | float | str | complex) or value is None else str(value)
