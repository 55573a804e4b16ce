"""Take the last all-reduce of a gradient out of the graph, so that it runs once a step and not for each microbatch.

Contract
    in   a joint graph with one stage for each gradient of a parameter; the group of ranks that share layers
    out  the same graph, in which a gradient that ended in a sum over this group is this rank's part of the gradient;
         `JointGraph.partial` names the group of each such parameter
    The runtime adds the parts of all ranks up, after those of all microbatches. The two sums change places, so gradients differ
    from those of the graph by rounding; they have the bits of an eager loop whose partial gradients are reduced at the end.

Under sequence parallelism the gradients of norms end so: two small messages for each norm and microbatch.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from graphpp.passes.graph.collectives import group_of, is_wait
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.program import Gradient


def delay_gradient_sums(joint: JointGraph, group: str) -> JointGraph:
    """Take the sums over `group`, by its name in this process, out of the ends of gradients, in place."""
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
    """The value of which `node` is the sum over `group`, if nobody else reads the sum; else None."""
    if not is_wait(node) or len(node.users) != 1:
        return None
    (started,) = node.all_input_nodes
    if started.target is not torch.ops._c10d_functional.all_reduce.default or len(started.users) != 1:
        return None
    value, reduction = started.args[:2]
    return value if isinstance(value, fx.Node) and reduction == "sum" and group_of(started) == group else None
