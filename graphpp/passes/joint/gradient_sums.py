"""Passes over sums of gradients: sums over stages, and sums over ranks, leave the graph for the end of the step.

Contract of `split_tied_gradients`: afterwards a parameter that several stages use has one `Gradient` result per stage: the sum
of that stage's terms, in their old order. At the end of the step the runtime adds the partial sums, on every rank with the
parameter. No partial sum crosses a boundary.

Contract of `delay_gradient_sums`: each gradient that ended in a sum over a group of ranks that share layers becomes this rank's
part of the gradient; `JointGraph.partial` names the group. The runtime adds the parts of all microbatches, then of all
ranks. The result differs from the graph's by rounding, and is bit-equal to an eager loop that reduces partial gradients at the
end. Under sequence parallelism this saves two small messages per norm and microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import fx

from graphpp.passes.graph.collectives import group_of, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, remove_unused
from graphpp.runtime.program import Gradient, OutputRole


def split_tied_gradients(joint: JointGraph) -> JointGraph:
    """Split the sums of tied parameters' gradients by stage, in place; nodes need `meta["stage"]`."""
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


def delay_gradient_sums(joint: JointGraph, group: str) -> JointGraph:
    """Remove the sums over `group` (its name in this process) from the ends of gradients, in place."""
    outputs, delayed = joint.outputs(), list[fx.Node]()
    makers = Counter(role for role, _ in outputs if isinstance(role, Gradient))
    joint.partial = {}
    for at, (role, wait) in enumerate(outputs):
        part = _part(wait, group) if isinstance(role, Gradient) and makers[role] == 1 else None
        if isinstance(role, Gradient) and part is not None:
            outputs[at], joint.partial[role.fqn] = (role, part), group
            delayed.append(wait)
    joint.set_outputs(outputs)
    for wait in delayed:
        (collective,) = wait.all_input_nodes
        joint.graph.erase_node(wait)
        joint.graph.erase_node(collective)
    return joint


def _part(node: fx.Node, group: str) -> fx.Node | None:
    """The value that `node` sums over `group`, if the sum has no other reader; else None."""
    if not is_wait(node) or len(node.users) != 1:
        return None
    (started,) = node.all_input_nodes
    if started.target is not torch.ops._c10d_functional.all_reduce.default or len(started.users) != 1:
        return None
    value, reduction = started.args[:2]
    return value if isinstance(value, fx.Node) and reduction == "sum" and group_of(started) == group else None
