"""Find the values of a graph that share memory: a view, or a wait for a collective, lies in the memory of its source."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from graphpp.passes.graph.collectives import is_wait

_UNDECLARED = {torch.ops.aten._unsafe_view.default, torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default}


def is_view(node: fx.Node) -> bool:
    """Whether the operation's schema declares that it returns views of its first input; items of such a tuple are views."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def shares_memory(node: fx.Node) -> bool:
    """Whether a value lies in the memory of the node's first input, or may do so at run time."""
    return bool(node.all_input_nodes) and (is_view(node) or node.target in _UNDECLARED or is_wait(node))


def is_copy(node: fx.Node) -> bool:
    """Whether an operation that views if possible (`reshape`, `contiguous`) must copy, given its input's traced strides."""
    if node.target not in _UNDECLARED:
        return False
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if node.target is torch.ops.aten.contiguous.default:
        return not source.is_contiguous()
    try:
        source.view(value.shape)
    except RuntimeError:
        return True
    return False


def root(node: fx.Node) -> fx.Node:
    """The node that allocated a value's memory."""
    while shares_memory(node):
        node = node.all_input_nodes[0]
    return node


def shared_results(graph: fx.Graph) -> frozenset[int]:
    """Indices of the results whose memory an input, another result or a reading operation of the graph shares.

    On a GPU such an operation could still run when the caller already writes into the result.
    """
    roots = [root(node) for node in graph.output_node().args[0]]  # type: ignore[union-attr,arg-type]
    count = Counter(roots)
    return frozenset(
        index for index, node in enumerate(roots) if node.op == "placeholder" or count[node] > 1 or _is_read(node)
    )


def _is_read(allocated: fx.Node) -> bool:
    """Whether an operation that is no view reads the memory that a node allocated."""
    users = (user for user in allocated.users if user.op != "output")
    return any(root(user) is not root(allocated) or _is_read(user) for user in users)
