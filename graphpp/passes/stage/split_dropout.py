"""Split dropout: draw the mask in one call, and leave the arithmetic to a compiler.

Contract: dropout becomes a mask, drawn from the microbatch's key by a call that reads nothing else, and two multiplications;
the result is bit-equal to the operator's. Other random operators stay unchanged.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphpp.passes.graph.joint_graph import copied
from graphpp.passes.graph.name_sizes import SizeInputs, with_inputs
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.runtime.random_keys import dropout_mask, seeded

_aten = torch.ops.aten


def split_dropout(source: PhaseGraph) -> PhaseGraph:
    if not any(map(_is_dropout, source.graph.nodes)):
        return source
    graph = copied(source.graph)
    sizes = SizeInputs(graph)
    for node in [node for node in graph.nodes if _is_dropout(node)]:
        _split(graph, node, sizes)
    graph.lint()
    return with_inputs(source, graph)


def _is_dropout(node: fx.Node) -> bool:
    return node.target is seeded and node.args[2] is _aten.native_dropout.default and bool(node.args[5])


def _split(graph: fx.Graph, node: fx.Node, sizes: SizeInputs) -> None:
    """Replace a dropout by x * mask * scale, multiplied in the operator's order."""
    key, index, _, x, probability, _ = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    size, stride = ([*map(sizes.of, each)] for each in (value.shape, value.stride()))
    like = {"size": size, "stride": stride, "dtype": value.dtype, "device": value.device}
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
