"""Let inputs with the role `Size` stand for the symbolic numbers of a graph.

Contract: afterwards no operation has a symbolic number among its arguments, and no node computes one. An operation that was
given `2*s1` reads the placeholder whose role is `Size("2*s1")`; the runtime fills the placeholder in. Numbers that turned out
to be the same for all sizes are literals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import SYMBOLIC, expression, symbol_sizes, symbols_of
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.runtime.program import Size


def name_sizes(graph: fx.Graph) -> bool:
    """Replace symbolic numbers by placeholders, in place; returns whether the graph has changed."""
    known = {node.meta["role"]: node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["role"], Size)}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    changed = False

    def named(value: Any) -> Any:
        nonlocal changed
        number = value.meta.get("val") if isinstance(value, fx.Node) else value
        if not isinstance(number, SYMBOLIC) or (isinstance(value, fx.Node) and value.op == "placeholder"):
            return value
        changed = True
        expr = expression(number)
        if expr.is_number:
            return float(expr) if isinstance(number, torch.SymFloat) else int(expr)
        role = Size(str(expr))
        if role not in known:
            with graph.inserting_before(first):
                known[role] = graph.placeholder(f"size_{len(known)}")
            known[role].meta = _meta(role, number)
        return known[role]

    for node in list(graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = _mapped(node.args, named), _mapped(node.kwargs, named)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and isinstance(node.meta.get("val"), SYMBOLIC):
            graph.erase_node(node)
    return changed


def with_named_sizes(source: PhaseGraph, *, symbols: bool = False) -> PhaseGraph:
    """A phase graph whose symbolic numbers are inputs; `source` stays as it is. `symbols`: all symbols are inputs too."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    end = graph.output(graph.graph_copy(source.graph, copies))
    end.meta = dict(source.graph.output_node().meta)
    changed = name_sizes(graph)
    if symbols:
        roles = {node.meta["role"] for node in graph.find_nodes(op="placeholder")}
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for name, size in sorted(symbolic_sizes(graph).items()):
            if name in symbols_of(size) and Size(name) not in roles:
                with graph.inserting_before(first):
                    graph.placeholder(f"size_{name}").meta = _meta(Size(name), size)
                changed = True
    if not changed:
        return source
    return replace(source, graph=graph, inputs=tuple(node.meta["role"] for node in graph.find_nodes(op="placeholder")))


def symbolic_sizes(graph: fx.Graph) -> dict[str, Any]:
    """The symbolic numbers by formula: those that operations are given, sizes and strides of all values, and the symbols."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                sizes = (*each.shape, *each.stride())
                found |= {str(expression(size)): size for size in sizes if isinstance(size, SYMBOLIC)}
    inputs = graph.find_nodes(op="placeholder")
    found |= {node.meta["role"].formula: node.meta["val"] for node in inputs if isinstance(node.meta["role"], Size)}
    for size in list(found.values()):
        found |= symbol_sizes(size)
    return found


def _meta(role: Size, number: Any) -> dict[str, Any]:
    return {"val": number, "backward": False, "stage": None, "role": role}


def _mapped(value: Any, change: Any) -> Any:
    """The value with `change` applied to the leaves of nested lists, tuples, slices and dicts."""
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(change(each) for each in (value.start, value.stop, value.step)))
    if isinstance(value, list | tuple):
        items = [_mapped(each, change) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    return change(value)
