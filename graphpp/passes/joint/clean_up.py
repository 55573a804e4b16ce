"""Remove identities and dead code from the joint graph. Bit-preserving.

Contract: afterwards every node has a reader, and none returns its own input (`detach`, `alias`, a view to the same shape
and strides, `t(t(x))`, `x ** 1`, a cast to the same dtype, a clone that keeps the strides). A clone of a part of a larger
memory stays, wherever the part lies: it lets the memory be freed, and ranks with other parts of a value keep equal graphs.

Without a clone, two results may be one tensor. That is safe: the runtime copies a shared result before it writes into it.
"""

from __future__ import annotations

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp._torch.symbols import formula
from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor, remove_unused

aten = torch.ops.aten

_IDENTITY = {
    aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.view.default, aten.reshape.default,
    aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor, aten.clone.default, aten._to_copy.default,
    aten.to.dtype, aten.squeeze.dims, aten.permute.default, aten.transpose.int,
}  # fmt: skip


def clean_up(joint: JointGraph) -> JointGraph:
    for node in list(joint.computed()):
        for rule in (_same_as_input, _double_transpose, _first_power):
            kept = rule(node)
            if kept is not None:
                node.replace_all_uses_with(kept)
                break
    remove_unused(joint.graph)
    return joint


def _same_as_input(node: fx.Node) -> fx.Node | None:
    """The first input of a node that returns it unchanged, elements and strides; else None."""
    if node.target not in _IDENTITY or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    same: bool = is_tensor(source) and is_tensor(node) and _layout(source) == _layout(node)
    return source if same and not (node.target is aten.clone.default and _is_part(source)) else None


def _is_part(node: fx.Node) -> bool:
    own, whole = node.meta["val"], root(node).meta["val"]
    if has_unknown_size(own) or not isinstance(whole, torch.Tensor):
        return False
    return bool(formula(own.numel()) != formula(whole.numel()))


def _layout(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    lazy = (value.is_conj(), value.is_neg())  # a copy would resolve a lazy conjugate or negation
    offset = 0 if has_unknown_size(value) else value.storage_offset()  # `write_graph.py` drops offsets of such values
    sizes = tuple(map(formula, (*value.shape, *value.stride(), offset)))
    return (value.dim(), sizes, value.dtype, value.device, value.layout, lazy)


def _double_transpose(node: fx.Node) -> fx.Node | None:
    inner = node.args[0] if node.args else None
    if node.target is aten.t.default and isinstance(inner, fx.Node) and inner.target is aten.t.default:
        return inner.args[0]  # type: ignore[return-value]
    return None


def _first_power(node: fx.Node) -> fx.Node | None:
    """`x`, for the node `x ** 1`, which autograd's derivative of a square contains."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 and _layout(node) == _layout(node.args[0]):  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    return None
