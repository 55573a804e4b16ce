"""Recompute: what a region of the forward made is computed again right before its backward, not saved.

Contract
--------
`region(node)` names the region that a forward operation belongs to (a layer, say), or None; `chosen(node)` says which of
its operations may run again. Afterwards the backward of a region reads copies of these, made from what came into the
region and from what of it is saved. Each operation has at most one copy, and the copies stand right before the first
operation of the backward that reads one of them. So an operation of a region runs twice per microbatch, once forward and
once again, and a value that both halves of a split backward read is computed once (`split_weight_grad` runs later and
hands it on).

Bit-preserving: random operators draw from the microbatch's key, so they repeat their numbers. Never run again, and so
saved: collectives, operations that read a buffer which the forward writes, operators that are not torch's own. Neither is
what the forward hands out of its region where another region starts from it or the backward outside reads it (it is saved
anyway), nor what another stage's backward reads.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.recompute.backward_needs import MayRecompute, is_repeatable, written_buffers
from graphpp.runtime import program

RegionOf = Callable[[fx.Node], Hashable | None]


def always(node: fx.Node) -> bool:
    """All operations of a region."""
    return True


def recompute_regions(joint: JointGraph, region: RegionOf, chosen: MayRecompute = always) -> JointGraph:
    """Let the backward of every region compute again what it reads of it, in place; nodes carry `meta["stage"]`."""
    regions = _Regions(joint, region, chosen)
    copies: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in joint.computed() if node.meta["backward"]]:
        read = [node for node in reader.all_input_nodes if node in regions.of]
        for node in read:
            _copy(joint, reader, regions.take(regions.of[node]), copies)
        for node in read:
            reader.replace_input_with(node, copies[node])
    joint.set_outputs([(role, copies.get(node, node) if _late(role) else node) for role, node in joint.outputs()])
    return joint


class _Regions:
    """The operations that may run again, by their region, and for each region those that its backward needs."""

    def __init__(self, joint: JointGraph, region: RegionOf, chosen: MayRecompute) -> None:
        self._fixed = written_buffers(joint)
        forward = [node for node in joint.computed() if not node.meta["backward"] and node.meta["stage"] is not None]
        named = {node: (name, node.meta["stage"]) for node in forward if (name := region(node)) is not None}
        self._twins = {node.meta["seq"]: place for node, place in named.items()}
        self.of: dict[fx.Node, Hashable] = {}
        for node, place in named.items():
            if self._again(node, chosen) and self._inside(node, named):
                self.of[node] = place
        self._needed: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in self._read_late():
            self._needed[self.of[node]].append(node)

    def take(self, place: Hashable) -> list[fx.Node]:
        """The operations of a region to be copied, in order; nothing the second time."""
        return self._needed.pop(place, [])

    def _read_late(self) -> list[fx.Node]:
        """The operations that the backward reads, and what they are computed from, in order."""
        pending = [node for node in self.of if any(user.op == "output" or user.meta["backward"] for user in node.users)]
        needed: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += [source for source in node.all_input_nodes if source in self.of]
        return [node for node in self.of if node in needed]

    def _inside(self, node: fx.Node, named: dict[fx.Node, tuple[Hashable, int]]) -> bool:
        """Whether only its region's own backward, on its own stage, wants a value later; then no one else saves it."""
        place, handed_out = named[node], any(named.get(user) != named[node] for user in _ahead(node))
        for user in node.users:
            if user.op == "output":
                if any(value is node and not _late(role) for role, value in _results(user)):
                    return False
            elif user.meta["backward"]:
                others = handed_out and self._twins.get(user.meta["seq"]) != place
                if others or user.meta["stage"] not in (None, node.meta["stage"]):
                    return False
            elif named.get(user, place) != place:
                return False
        return True

    def _again(self, node: fx.Node, chosen: MayRecompute) -> bool:
        """Whether an operation may run again; of several results of one each goes with the operation."""
        if node.target is operator.getitem:
            return node.all_input_nodes[0] in self.of
        return chosen(node) and is_repeatable(node) and not self._fixed.intersection(node.all_input_nodes)


def _copy(joint: JointGraph, reader: fx.Node, members: list[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Copy the operations in front of `reader`, as a part of the backward."""
    with joint.graph.inserting_before(reader):
        for node in members:
            copies[node] = joint.graph.node_copy(node, lambda source: copies.get(source, source))
            copies[node].meta = {**node.meta, "backward": True, "position": -1, "recomputed": True}


def _ahead(node: fx.Node) -> list[fx.Node]:
    """The forward's readers of a value."""
    return [user for user in node.users if user.op != "output" and not user.meta["backward"]]


def _late(role: object) -> bool:
    """Whether a result is the backward's."""
    return isinstance(role, program.Gradient)


def _results(end: fx.Node) -> list[tuple[object, fx.Node]]:
    return list(zip(end.meta["roles"], end.args[0], strict=True))  # type: ignore[arg-type]
