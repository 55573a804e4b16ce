"""One export of a model and its loss, and whether two exports are alike.

Contract: `alike` is true only if both graphs have the same operators in the same order with the same arguments, equal
constants, equal shapes, strides and dtypes, the same roles of results and the same custom Functions with equal arguments.
Names of nodes and source lines do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpp._torch import pytree
from graphpp._torch.symbols import SYMBOLIC
from graphpp.capture.activation_checkpoints import CheckpointedCalls
from graphpp.capture.attributes.entry_state import Accesses
from graphpp.capture.attributes.writes import AttributeWrites
from graphpp.capture.autograd_functions import FunctionCalls
from graphpp.runtime.program import OutputRole

_PLAIN = (bool, int, float, complex, str, bytes, torch.device)  # values of other types are equal if they are one object


@dataclass
class TraceResults:
    """Facts that are learned while the forward runs; `accesses`: those to watched attributes."""

    results: tuple[OutputRole, ...] = ()
    output_spec: pytree.TreeSpec | None = None
    output_leaves: tuple[Any, ...] = ()
    writes: AttributeWrites = field(default_factory=AttributeWrites)
    checkpoints: CheckpointedCalls = field(default_factory=CheckpointedCalls)
    accesses: Accesses = field(default_factory=Accesses)


@dataclass(frozen=True)
class Exported:
    """The exported graph, the custom Functions that it applies, the facts learned on the way, and the fake inputs."""

    module: fx.GraphModule
    functions: FunctionCalls
    found: TraceResults
    inputs: tuple[torch.Tensor, ...]


def alike(one: Exported, other: Exported) -> bool:
    """Whether two exports compute the same values from the same inputs."""
    outside = [(each.found.results, each.found.output_spec, len(each.functions.applied)) for each in (one, other)]
    if outside[0] != outside[1] or not _equal(one.found.output_leaves, other.found.output_leaves, {}):
        return False
    pairs = zip(one.functions.applied, other.functions.applied, strict=True)
    functions = all(
        a.function is b.function and a.spec == b.spec and a.grad_enabled == b.grad_enabled
        and all(_equal_leaves(x, y) for x, y in zip(a.leaves, b.leaves, strict=True))
        for a, b in pairs
    )  # fmt: skip
    return functions and _alike_graphs(one.module, other.module)


def _equal_leaves(one: Any, other: Any) -> bool:
    """Whether two arguments of a Function are equal; tensors are arguments in the graph."""
    return (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or _equal(one, other, {})


def _alike_graphs(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    if len(one.graph.nodes) != len(other.graph.nodes):
        return False
    twin: dict[fx.Node, fx.Node] = {}
    for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
        if a.op != b.op or not _same_target(a, b, one, other):
            return False
        if not _equal((a.args, a.kwargs), (b.args, b.kwargs), twin) or not _equal(a.meta.get("val"), b.meta.get("val"), twin):
            return False
        twin[a] = b
    return True


def _same_target(a: fx.Node, b: fx.Node, one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two nodes run the same operator, or read the same attribute or an equal constant."""
    if a.op == "get_attr":
        mine, theirs = _held(one, str(a.target)), _held(other, str(b.target))
        if isinstance(mine, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
            return _alike_graphs(mine, theirs)
        return a.target == b.target and (mine is theirs or _equal_tensors(mine, theirs))
    return a.op == "placeholder" or a.target == b.target


def _held(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _equal_tensors(one: Any, other: Any) -> bool:
    """Whether two constants are equal. Fake tensors, parameters for instance, are equal only if they are one object."""
    plain = type(one) is type(other) is torch.Tensor
    return plain and one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _equal(one: Any, other: Any, twin: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether two arguments are equal: nodes by their twins, tensors by layout, plain data by type and value."""
    if isinstance(one, fx.Node):
        return twin.get(one) is other
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _layout(one) == _layout(other)
    if type(one) is not type(other) or isinstance(one, SYMBOLIC):
        return False
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        plain = isinstance(one, _PLAIN) and (one == other or (one != one and other != other))  # nan is equal to nan
        return one is other or bool(plain)
    return len(parts) == len(others) and all(_equal(*pair, twin) for pair in zip(parts, others, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """The items of a sequence, dict or slice; None for other values."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
