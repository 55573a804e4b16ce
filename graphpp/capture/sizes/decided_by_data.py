"""Data-dependent numbers and sizes: `x[mask]`, `nonzero()`, `.item()`.

Contract: in a trace such a number is an unbacked symbol. Where torch cannot decide a comparison of symbols for all data, it may
assume the answer that the operation needs, such as equal sizes in `x[one] + x[other]`. Each assumption becomes a check in the
joint graph, which raises if a microbatch violates it. `admit_numbers_of_data` raises `CaptureError` where a graph cannot be
right for all data, or its memory has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from graphpp._torch import aot, pytree
from graphpp._torch.numbers_of_data import as_constant, assumptions, compute, has_unknown_size, is_of_data, own_symbol
from graphpp._torch.symbols import is_unknown, largest
from graphpp.capture.source_lines import user_line
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.runtime import program

aten = torch.ops.aten


def admit_numbers_of_data(joint: JointGraph, mode: Any) -> None:
    """Add the checks to a graph traced in `mode`, in place. Raises `CaptureError`."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        joint.graph.erase_node(node)  # its condition is among the assumptions of the trace
    decided = [node for node in joint.computed() if is_of_data(node.meta["val"])]
    for node in decided:
        _refuse(node)
    for role, node in joint.outputs():
        if has_unknown_size(node.meta["val"]):
            place = f"the output, made by {node.target} at {describe_node(node)}," if isinstance(role, program.Output) else role
            raise CaptureError(f"only the data decides the size of {place}: microbatches cannot be put together again.")
    if decided:
        _add_checks(joint, mode)
    for node in joint.computed():
        node.meta["val"] = as_constant(node.meta["val"])


def drop_unused_numbers(module: fx.GraphModule) -> None:
    """Erase operations without a use from an exported graph with data-dependent sizes, such as those of metrics."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    if any(is_unknown(size) for value in values if isinstance(value, torch.Tensor) for size in value.shape):
        module.graph.eliminate_dead_code()
        module.recompile()


def _refuse(node: fx.Node) -> None:
    if isinstance(node.target, aot.HigherOrderOperator):
        raise CaptureError(
            f"{node.target} at {node.meta['source'] or 'the loss'} has a gradient or writes in place, and only the data "
            "decides the size of the values that it saves or makes. Use torch's scan over a fixed number of iterations, or "
            "hand the operator detached tensors only, also those that its body reads from outside."
        )
    tensors = [each for each in pytree.tree_leaves(node.meta["val"]) if isinstance(each, torch.Tensor)]
    if any(is_unknown(size) and not math.isfinite(largest(size)) for each in tensors for size in each.shape):
        raise CaptureError(
            f"only the data decides a size at {describe_node(node)}, and nothing bounds the size, so the memory of a step "
            "cannot be counted. State a bound in the forward: torch._check(n <= limit)."
        )
    if node.target in _SQUEEZES and _may_squeeze(node):
        raise CaptureError(
            f"squeeze at {describe_node(node)} removes a dimension only if the data gives it the size 1, and a captured graph "
            "has one number of dimensions. Name the dimensions to remove."
        )


def refuse_rounding() -> NoReturn:
    """Raise `CaptureError` for arithmetic that a trace cannot reproduce to the last bit."""
    raise CaptureError(
        "arithmetic with a floating-point number that only the data decides, at "
        f"{user_line()}: torch computes with such numbers as in algebra, and Python rounds after "
        "each operation. Keep the number a tensor: leave .item() out."
    )


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _may_squeeze(node: fx.Node) -> bool:
    source: Any = node.args[0]
    shape = source.meta["val"].shape
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    return any(is_unknown(shape[dim]) for dim in (dims if isinstance(dims, list | tuple | range) else [dims]))


def _add_checks(joint: JointGraph, mode: Any) -> None:
    """Add checks of the trace's assumptions; a symbol that no value of the graph has belongs to another trace."""
    places = _Places(joint)
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    for assumed in assumptions(mode):
        known = assumed.free_symbols & places.found.keys()
        if known and known < assumed.free_symbols and joint.symbols is not None:
            raise CaptureError(f"the trace assumes {assumed} of a number and a size")
        if assumed.free_symbols <= places.found.keys():
            first = max((places.found[symbol][0] for symbol in assumed.free_symbols), key=order.__getitem__)
            with joint.graph.inserting_after(first):
                anchor = joint.graph.call_function(aten._assert_scalar.default, (True, ""))
            with joint.graph.inserting_before(anchor):
                numbers = {symbol: places.number(symbol) for symbol in assumed.free_symbols}
                made = compute(joint.graph, assumed, numbers)
            about = ", ".join(f"{symbol} from {_origin(places.found[symbol][0])}" for symbol in numbers)
            equation = " == ".join(map(str, assumed.args)) if assumed.func.__name__ == "Equality" else assumed
            anchor.args = (made[-1], f"the model needs {equation}, and the data of this microbatch do not have it: {about}")
            for node in (*(each for each in numbers.values() if "position" not in each.meta), *made, anchor):
                node.meta |= {key: first.meta[key] for key in ("backward", "position", "calls", "source", "seq")}
            anchor.meta["val"] = None


def _origin(node: fx.Node) -> str:
    role = node.all_input_nodes[0].meta.get("role") if node.all_input_nodes else None
    return role.path if isinstance(role, program.Number) else describe_node(node)


class _Places:
    """The node of each data-dependent symbol: a number, or a tensor with this size; `found`: (node, dimension)."""

    def __init__(self, joint: JointGraph) -> None:
        self._graph = joint.graph
        self.found: dict[Any, tuple[fx.Node, int | None]] = {}
        for node in joint.computed():
            for symbol, dim in _own_symbols(node.meta["val"]):
                self.found.setdefault(symbol, (node, dim))

    def number(self, symbol: Any) -> fx.Node:
        """A node with the number of a symbol, inserted at the graph's insertion point if needed."""
        node, dim = self.found[symbol]
        if dim is None:
            return node
        made = self._graph.call_function(aten.sym_size.int, (node, dim))
        made.meta["val"] = node.meta["val"].shape[dim]
        return made


def _own_symbols(value: Any) -> Iterator[tuple[Any, int | None]]:
    sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
    yield from ((symbol, dim) for dim, size in sizes if (symbol := own_symbol(size)) is not None)
