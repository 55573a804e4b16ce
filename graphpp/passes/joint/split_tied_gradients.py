"""Split tied gradients: the gradient of a parameter that several stages use becomes one partial sum per stage.

Contract: afterwards a parameter that several stages use has one `Gradient` result per stage: the sum of that stage's
contributions, in their old order. The runtime adds the partial sums once, at the end of the step, on every rank that holds the
parameter. No partial sum crosses a boundary.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, remove_unused
from graphpp.runtime.program import Gradient, OutputRole


def split_tied_gradients(joint: JointGraph) -> JointGraph:
    """Split the sums of tied parameters' gradients by stage, in place; nodes carry `meta["stage"]`."""
    outputs: list[tuple[OutputRole, fx.Node]] = []
    for role, node in joint.outputs():
        parts: dict[int, list[fx.Node]] = defaultdict(list)
        for term in _terms(node) if isinstance(role, Gradient) else ():
            if term.meta["stage"] is not None:
                parts[term.meta["stage"]].append(term)
        sums = [_sum(joint.graph, parts[stage]) for stage in sorted(parts)] if len(parts) > 1 else [node]
        outputs += [(role, each) for each in sums]
    joint.set_outputs(outputs)
    remove_unused(joint.graph)
    return joint


def _terms(node: fx.Node) -> list[fx.Node]:
    """The terms of a tree of additions, in order; a sum with another reader is a term itself."""
    plain = node.target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if not plain or len(node.users) != 1 or not all(isinstance(arg, fx.Node) for arg in node.args):
        return [node]
    if any(arg.meta["val"].shape != node.meta["val"].shape for arg in node.all_input_nodes):
        return [node]
    return [term for arg in node.args for term in _terms(arg)]  # type: ignore[arg-type]


def _sum(graph: fx.Graph, parts: list[fx.Node]) -> fx.Node:
    total = parts[0]
    for part in parts[1:]:
        with graph.inserting_before(graph.output_node()):
            added = graph.call_function(torch.ops.aten.add.Tensor, (total, part))
        added.meta = {**part.meta}
        total = added
    return total
