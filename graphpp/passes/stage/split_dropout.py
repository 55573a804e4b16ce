"""Part dropout: the random numbers apart from the arithmetic, so that a compiler may have the arithmetic.

Contract: afterwards dropout is a mask, drawn from the microbatch's key by a call of its own that reads nothing else, and two
products with it: the same numbers as the operator's own, bit for bit. Other random operators stay as they are.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.runtime.randomness import dropout_mask, seeded

_aten = torch.ops.aten


def split_dropout(slot: PhaseGraph) -> PhaseGraph:
    """The program's graph with its dropouts parted; `slot` stays as it is."""
    if not any(map(_is_dropout, slot.graph.nodes)):
        return slot
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    end = slot.graph.output_node()
    graph.output(graph.graph_copy(slot.graph, known)).meta = dict(end.meta)
    for node in [node for node in graph.nodes if _is_dropout(node)]:
        _part(graph, node)
    graph.lint()
    return replace(slot, graph=graph)


def _is_dropout(node: fx.Node) -> bool:
    return node.target is seeded and node.args[2] is _aten.native_dropout.default and bool(node.args[5])


def _part(graph: fx.Graph, node: fx.Node) -> None:
    """x * mask * scale, in the operator's order."""
    key, index, _, x, probability, _ = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    like = {"size": list(value.shape), "stride": list(value.stride()), "dtype": value.dtype, "device": value.device}
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0  # type: ignore[operator]
    dropped, mask = node.meta["val"]
    with graph.inserting_before(node):
        drawn = graph.call_function(dropout_mask, (key, index, like, probability))
        drawn.meta = {**node.meta, "val": mask}
        masked = graph.call_function(_aten.mul.Tensor, (x, drawn))
        scaled = graph.call_function(_aten.mul.Tensor, (masked, scale))
        masked.meta = {**node.meta, "val": dropped}
        scaled.meta = dict(masked.meta)
    for item in list(node.users):
        assert item.target is operator.getitem, f"{item} reads a tuple"
        item.replace_all_uses_with(drawn if item.args[1] else scaled)
        graph.erase_node(item)
    graph.erase_node(node)
