"""Torch's pytree, as `torch.export` uses it: nested inputs and outputs of a model as flat leaves with a structure.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch.utils._pytree`: `SUPPORTED_NODES`, the registered classes; `TreeSpec._context` and `TreeSpec._children` (2.11:
  `context`, `children_specs`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec
keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten


def register(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    flatten_with_keys: Callable[[Any], tuple[list[tuple[Any, Any]], Any]],
) -> None:
    """Let objects of a class be structures: leaves, also with the key of each in a path, and the data to rebuild the object."""
    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def leaf_spec() -> TreeSpec:
    return _pytree.tree_structure(0)


def context(spec: TreeSpec) -> Any:
    """The data from which the class of a structure rebuilds an object, such as the keys of a dict."""
    return spec._context if hasattr(spec, "_context") else spec.context


def children(spec: TreeSpec) -> list[TreeSpec]:
    return list(spec._children if hasattr(spec, "_children") else spec.children_specs)


def registered_classes() -> Iterable[type]:
    return _pytree.SUPPORTED_NODES
