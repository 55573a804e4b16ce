"""The key of a region, and of every other graph that is compiled or timed once: a hash of the computation.

Contract: graphs with equal keys compute the same from the same inputs. The key has the operations, their arguments, and the
shapes, strides, dtypes and devices of the inputs, but no names, and is equal in all processes. On disk the key of
`backends/inductor.py` adds the compiler and its options.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import formula
from graphpp.passes.text.render import attribute_of


def graph_key(graph: fx.Graph, arguments: Callable[[fx.Node], Sequence[Any]] = attrgetter("args")) -> str:
    """A hash of a computation. `arguments`: the positional arguments of a node that the hash covers."""
    numbers = {node: f"node {index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"input {_layout(node.meta.get('val'))}")
        elif node.op == "get_attr":
            lines.append(f"held {_held(attribute_of(node))}")
        else:
            target: Any = node.target  # a function's `str` has its address, which differs between processes
            name = f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)
            given = fx.node.map_arg((arguments(node), sorted(node.kwargs.items())), numbers.__getitem__)
            lines.append(f"{name} {given}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _held(value: Any) -> str:
    """A graph's attribute as text: the key of a branch of `torch.cond`, the layout of a constant."""
    if isinstance(value, fx.GraphModule):
        return graph_key(value.graph)
    return str(_layout(value)) if isinstance(value, torch.Tensor) else repr(value)


def _layout(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (formula(value),)
    return (*(tuple(map(formula, sizes)) for sizes in (value.shape, value.stride())), value.dtype, str(value.device))
