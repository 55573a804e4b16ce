"""Recompute regions: the backward of a region recomputes its activations from the region's inputs; they are not saved.

Contract: `region_of(node)` names the region of a forward operation (such as a layer), or is None; `may_recompute(node)` says
whether it may run again. Afterwards a region's backward reads copies of its operations, computed from the region's inputs and
saved values. Each operation has at most one copy, and the copies stand right before the first backward operation that reads one
of them. If I and W both read a recomputed value, `split_weight_grad` lets I compute it and save it for W.

No bit changes: random operators draw from the microbatch's key and repeat their numbers. Saved, and not recomputed: results of
collectives, of operations that read a buffer which the forward writes, and of operators that are not torch's own. A region's
output is saved if another region, or another region's or stage's backward, reads it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, reached, results_of
from graphpp.passes.recompute.backward_needs import MayRecompute, is_repeatable, written_buffers
from graphpp.runtime import program

RegionOf = Callable[[fx.Node], Hashable | None]


def always(node: fx.Node) -> bool:
    return True


def recompute_regions(joint: JointGraph, region_of: RegionOf, may_recompute: MayRecompute = always) -> JointGraph:
    """Let the backward of every region recompute the values that it reads, in place; nodes need `meta["stage"]`."""
    regions = _Regions(joint, region_of, may_recompute)
    copies: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in joint.computed() if node.meta["backward"]]:
        read = [node for node in reader.all_input_nodes if node in regions.of]
        for node in read:
            _copy(joint, reader, regions.take(regions.of[node]), copies)
        for node in read:
            reader.replace_input_with(node, copies[node])
    joint.set_outputs([(role, copies.get(node, node) if _is_gradient(role) else node) for role, node in joint.outputs()])
    return joint


class _Regions:
    """The operations to recompute: `of` has the region of each, (name, stage)."""

    def __init__(self, joint: JointGraph, region_of: RegionOf, may_recompute: MayRecompute) -> None:
        self._fixed = written_buffers(joint)
        forward = [node for node in joint.computed() if not node.meta["backward"] and node.meta["stage"] is not None]
        named = {node: (name, node.meta["stage"]) for node in forward if (name := region_of(node)) is not None}
        self._twins = {node.meta["seq"]: region for node, region in named.items()}
        self.of: dict[fx.Node, Hashable] = {}
        for node, region in named.items():
            if self._can_repeat(node, may_recompute) and self._inside(node, named):
                self.of[node] = region
        self._needed: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in self._read_by_backward():
            self._needed[self.of[node]].append(node)

    def take(self, region: Hashable) -> list[fx.Node]:
        return self._needed.pop(region, [])

    def _read_by_backward(self) -> list[fx.Node]:
        read = [node for node in self.of if any(user.op == "output" or user.meta["backward"] for user in node.users)]
        needed = reached(read, lambda node: [source for source in node.all_input_nodes if source in self.of])
        return [node for node in self.of if node in needed]

    def _inside(self, node: fx.Node, named: dict[fx.Node, tuple[Hashable, int]]) -> bool:
        """Whether only the backward of the value's own region and stage reads it after the forward; else the value is saved."""
        region, leaves = named[node], any(named.get(user) != named[node] for user in _forward_readers(node))
        for user in node.users:
            if user.op == "output":
                if any(value is node and not _is_gradient(role) for role, value in results_of(user.graph)):
                    return False
            elif user.meta["backward"]:
                foreign = leaves and self._twins.get(user.meta["seq"]) != region
                if foreign or user.meta["stage"] not in (None, node.meta["stage"]):
                    return False
            elif named.get(user, region) != region:
                return False
        return True

    def _can_repeat(self, node: fx.Node, may_recompute: MayRecompute) -> bool:
        """Whether an operation may run again; an item of a tuple follows the tuple's operation."""
        if node.target is operator.getitem:
            return node.all_input_nodes[0] in self.of
        return may_recompute(node) and is_repeatable(node) and not self._fixed.intersection(node.all_input_nodes)


def _copy(joint: JointGraph, reader: fx.Node, members: list[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    with joint.graph.inserting_before(reader):
        for node in members:
            copies[node] = joint.graph.node_copy(node, lambda source: copies.get(source, source))
            copies[node].meta = {**node.meta, "backward": True, "position": -1, "recomputed": True}


def _forward_readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output" and not user.meta["backward"]]


def _is_gradient(role: object) -> bool:
    return isinstance(role, program.Gradient)
