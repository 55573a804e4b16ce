"""Recompute regions: the backward of a region recomputes its activations from the region's inputs; they are not saved.

Contract: `region_of(node)` names the region of a forward operation (such as a layer), or is None; `may_recompute(node)` says
whether it may run again. Afterwards a region's backward reads copies of its operations (`rematerialize`), computed from the
region's inputs and saved values. If I and W both read a recomputed value, `split_weight_grad` lets I compute it and save it for
W.

No bit changes: random operators draw from the microbatch's key and repeat their numbers. Saved, and not recomputed: results of
collectives, of operations that read a buffer which the forward writes, and of operators that are not torch's own. A region's
output is saved if another region, or another region's or stage's backward, reads it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, results_of
from graphpp.passes.recompute.backward_needs import MayRecompute, RegionOf, always, is_repeatable, written_buffers
from graphpp.passes.recompute.rematerialize import rematerialize
from graphpp.runtime import program

Named = dict[fx.Node, tuple[Hashable, int]]
"""The region and the stage of each forward operation in a region."""


def recompute_regions(joint: JointGraph, region_of: RegionOf, may_recompute: MayRecompute = always) -> JointGraph:
    """Let the backward of every region recompute the values that it reads, in place; nodes need `meta["stage"]`."""
    forward = [node for node in joint.computed() if not node.meta["backward"] and node.meta["stage"] is not None]
    named: Named = {node: (name, node.meta["stage"]) for node in forward if (name := region_of(node)) is not None}
    twins, fixed = {node.meta["seq"]: region for node, region in named.items()}, written_buffers(joint)
    chosen: dict[int, set[fx.Node]] = defaultdict(set)
    for node, (_, stage) in named.items():
        if node.target is operator.getitem:
            again = node.all_input_nodes[0] in chosen[stage]  # an item of a tuple follows the tuple's operation
        else:
            again = may_recompute(node) and is_repeatable(node) and not fixed.intersection(node.all_input_nodes)
        if again and _is_inside(node, named, twins):
            chosen[stage].add(node)
    return rematerialize(joint, chosen)


def _is_inside(node: fx.Node, named: Named, twins: dict[int, tuple[Hashable, int]]) -> bool:
    """Whether only the backward of the value's own region and stage reads it after the forward; else the value is saved."""
    region = named[node]
    forward = [user for user in node.users if user.op != "output" and not user.meta["backward"]]
    leaves = any(named.get(user) != region for user in forward)
    for user in node.users:
        if user.op == "output":
            if any(value is node and not isinstance(role, program.Gradient) for role, value in results_of(user.graph)):
                return False
        elif user.meta["backward"]:
            foreign = leaves and twins.get(user.meta["seq"]) != region
            if foreign or user.meta["stage"] not in (None, node.meta["stage"]):
                return False
        elif named.get(user, region) != region:
            return False
    return True
