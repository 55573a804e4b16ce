"""Let inputs with the role `Size` stand for the symbolic numbers of a graph.

Contract: after `name_sizes` no operation has a symbolic number as an argument, and no node computes one. An operation that was
given `2*s1` reads the placeholder with the role `Size("2*s1")`, which the runtime fills in. Numbers that are equal for all
sizes are literals. A pass that gives an operation a size gets the node from `SizeInputs`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import SYMBOLIC, expression, is_unknown, name_of, plain_number, symbol_sizes, symbols_of
from graphpp.passes.graph.joint_graph import copied
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.runtime.program import Size


class SizeInputs:
    """The placeholders of a graph that are symbolic numbers; new ones follow the other placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._known = {node.meta["role"]: node for node in _placeholders(graph) if isinstance(node.meta["role"], Size)}
        self._first = next(node for node in graph.nodes if node.op != "placeholder")

    def of(self, number: Any) -> Any:
        """The placeholder of a symbolic number; the number itself if it is equal for all sizes."""
        if not isinstance(number, SYMBOLIC):
            return number
        if not expression(number).free_symbols:
            return plain_number(number, expression(number))
        role = Size(name_of(number))
        if role not in self._known:
            with self._graph.inserting_before(self._first):
                node = self._graph.placeholder(f"size_{len(self._known)}")
            node.meta = {"val": number, "backward": False, "stage": None, "role": role}
            self._known[role] = node
        return self._known[role]


def name_sizes(graph: fx.Graph) -> None:
    inputs, computed = SizeInputs(graph), [node for node in graph.nodes if node.op == "call_function"]

    def named(value: Any) -> Any:
        number = value.meta.get("val") if isinstance(value, fx.Node) else value
        return inputs.of(number) if isinstance(number, SYMBOLIC) and not is_unknown(number) else value

    for node in computed:
        node.args, node.kwargs = fx.node.map_aggregate(node.args, named), fx.node.map_aggregate(node.kwargs, named)
    for node in reversed(computed):
        if not node.users and isinstance(node.meta.get("val"), SYMBOLIC):
            graph.erase_node(node)


def with_symbols(source: PhaseGraph) -> PhaseGraph:
    """A phase graph with each symbol of its sizes as an input; `source` stays unchanged."""
    symbols = {name: size for name, size in symbolic_sizes(source.graph).items() if name in symbols_of(size)}
    if not symbols:
        return source
    graph = copied(source.graph)
    inputs = SizeInputs(graph)
    for _, size in sorted(symbols.items()):
        inputs.of(size)
    return with_inputs(source, graph)


def with_inputs(source: PhaseGraph, graph: fx.Graph) -> PhaseGraph:
    return replace(source, graph=graph, inputs=tuple(node.meta["role"] for node in _placeholders(graph)))


def symbolic_sizes(graph: fx.Graph) -> dict[str, Any]:
    """The symbolic numbers by formula: operations' size inputs, sizes and strides of all values, and their symbols."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                sizes = (*each.shape, *each.stride())
                found |= {name_of(size): size for size in sizes if isinstance(size, SYMBOLIC) and not is_unknown(size)}
    inputs = [node for node in _placeholders(graph) if isinstance(node.meta["role"], Size)]
    found |= {node.meta["role"].formula: node.meta["val"] for node in inputs}
    for size in list(found.values()):
        found |= symbol_sizes(size)
    return found


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))
