"""Merge views: equal views of one value become one node, and a `view` of a `view` becomes one `view`.

Contract: bit-preserving. The pass runs after `assign_stages` and merges only nodes of one stage and phase, so that no
additional value crosses a boundary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.joint_graph import JointGraph, remove_unused

aten = torch.ops.aten
_RESHAPING = (aten.view.default, aten._unsafe_view.default)


def merge_views(joint: JointGraph) -> JointGraph:
    """Merge equal views and chains of `view`, in place; nodes carry `meta["stage"]`."""
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
    """Whether a node reshapes the result of another reshape of the same stage and phase."""
    source = node.args[0]
    if node.target not in _RESHAPING or not isinstance(source, fx.Node) or source.target not in _RESHAPING:
        return False
    return _place(source) == _place(node)


def _key(value: Any) -> Any:
    """A hashable form of arguments, with types: 1, 1.0 and True compare equal, but must not be merged."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    return (type(value).__name__, value)
