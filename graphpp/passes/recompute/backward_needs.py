"""Collect the forward values that a stage's backward reads, with the bytes of saving and the cost of recomputing each.

Contract: `backward_needs(index, stage, may_recompute, cost)` has every tensor that the stage's forward computes or receives and
its backward reads, and the values from which these could be recomputed, as far as `may_recompute(node)` allows. A view is never
saved, only its source. Values available without saving (parameters, buffers, inputs, views of them, step-invariant values) are
left out. Groups of values do not depend on each other; equal layers have equal groups.

Never recomputed: operators that are not torch's own, collectives, and operations that read a buffer which the forward
writes. Random operators may be recomputed, since they draw from the microbatch's key. A value that the backward of an earlier
stage reads is saved in any case, so its bytes count 0.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from torch import fx

from graphpp.passes.graph.aliases import is_copy, is_view, shares_memory
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, is_of_torch, is_tensor, reached
from graphpp.passes.graph.op_costs import Cost, nbytes
from graphpp.passes.recompute.min_cut import CutProblem
from graphpp.runtime import program
from graphpp.runtime.random_keys import seeded

PICOSECONDS = 1e12  # per second; minimum cuts take integers
MayRecompute = Callable[[fx.Node], bool]
RegionOf = Callable[[fx.Node], Hashable | None]


def always(node: fx.Node) -> bool:
    return True


@dataclass(frozen=True)
class ValueGroup:
    """Values in the order in which the forward computes them, and their cut problem; costs in picoseconds."""

    nodes: tuple[fx.Node, ...]
    problem: CutProblem


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operation may run twice: one of torch's own operators, or a random operator with a key."""
    return node.target is seeded or is_of_torch(node)


def written_buffers(joint: JointGraph) -> set[fx.Node]:
    """The placeholders of buffers that the forward writes: the backward would read their new values."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    inputs = joint.inputs().items()
    return {node for role, node in inputs if isinstance(role, program.Buffer) and role.fqn in written}


class StageIndex:
    """The operations of a joint graph by stage, found in one pass; nodes need `meta["stage"]`.

    `order`: the position of each node. `forward`, `backward`: the operations of each stage, in order. `gradients`: by stage,
    the gradients of parameters with a stage. `written`: the placeholders of buffers that the forward writes.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.order = {node: at for at, node in enumerate(joint.graph.nodes)}
        self.written = written_buffers(joint)
        self.forward: dict[int, list[fx.Node]] = defaultdict(list)
        self.backward: dict[int, list[fx.Node]] = defaultdict(list)
        self.gradients: dict[int, list[fx.Node]] = defaultdict(list)
        for node in joint.computed():
            if node.meta["stage"] is not None:
                (self.backward if node.meta["backward"] else self.forward)[node.meta["stage"]].append(node)
        for role, node in joint.outputs():
            if isinstance(role, program.Gradient) and node.meta["stage"] is not None:
                self.gradients[node.meta["stage"]].append(node)


def backward_needs(index: StageIndex, stage: int, may_recompute: MayRecompute, cost: Cost) -> list[ValueGroup]:
    needs = _Needs(index, stage, may_recompute)
    return [_group(needs, nodes, cost) for nodes in _independent(needs)]


class _Needs:
    """The `values` of a stage in order, of which the backward reads `read` and may recompute `recomputable`."""

    def __init__(self, index: StageIndex, stage: int, may_recompute: MayRecompute) -> None:
        self._stage, self._may_recompute = stage, may_recompute
        self._fixed = index.written
        self._forward = _members(index, stage)
        read = {source for node in index.backward[stage] for source in node.all_input_nodes} | set(index.gradients[stage])
        received = {source for node in self._forward for source in node.all_input_nodes}
        own = sorted(filter(self._is_value, self._forward | received | read), key=index.order.__getitem__)
        self.read = {node for node in own if is_tensor(node) and node in read}
        self.recomputable: set[fx.Node] = set()
        self.values = self._reached(own)

    def _is_value(self, node: fx.Node) -> bool:
        """Whether this stage computes or receives a forward value; values available without saving do not count."""
        if node.meta["backward"] or node.op != "call_function" or node.meta.get("step_invariant"):
            return False
        return node in self._forward or (node.meta["stage"] is not None and node.meta["stage"] < self._stage)

    def is_saved_anyway(self, node: fx.Node) -> bool:
        """Whether the backward of an earlier stage, which runs later, reads the value."""
        readers = [user.meta["stage"] for user in node.users if user.op != "output" and user.meta["backward"]]
        return node.meta["stage"] == self._stage and any(reader is not None and reader < self._stage for reader in readers)

    def _reached(self, own: list[fx.Node]) -> list[fx.Node]:
        repeating: set[fx.Node] = set()
        for node in own:
            if self._can_repeat(node, repeating):
                repeating.add(node)
        needed = set(self.read)
        for node in reversed(own):
            if node in needed and node in repeating and not self.is_saved_anyway(node):
                self.recomputable.add(node)
                needed.update(self.sources(node))
        return [node for node in own if node in needed]

    def _can_repeat(self, node: fx.Node, repeating: set[fx.Node]) -> bool:
        if node not in self._forward or self._fixed.intersection(node.all_input_nodes):
            return False
        if any(not is_tensor(source) and source not in repeating for source in self.sources(node)):
            return False  # a tuple or a number is never saved
        if node.target is operator.getitem:
            return node.all_input_nodes[0] in repeating
        if is_collective(node) or is_wait(node) or not is_repeatable(node):
            return False
        return is_free(node) or self._may_recompute(node)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if self._is_value(source)]


def is_free(node: fx.Node) -> bool:
    """Whether a value is a view: recomputing it takes no time, and keeping it takes no bytes except its source's."""
    return shares_memory(node) and not is_wait(node) and not is_copy(node)


def _members(index: StageIndex, stage: int) -> set[fx.Node]:
    """The operations of a stage's forward, and the operations without a stage that it reads, except views of placeholders."""

    def anywhere(node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each.op != "placeholder" and each.meta["stage"] is None]

    members = reached(index.forward[stage], anywhere)
    return {node for node in members if not (node.meta["stage"] is None and _of_placeholder(node))}


def _of_placeholder(node: fx.Node) -> bool:
    return node.op == "placeholder" or (is_view(node) and all(map(_of_placeholder, node.all_input_nodes)))


def _independent(needs: _Needs) -> list[list[fx.Node]]:
    """The values in groups, each value with its undecided inputs (see `_undecided`)."""
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in needs.values:
        joined = [node]
        for source in _undecided(needs, node):
            joined = joined if group[source] is joined else group[source] + joined
            for member in joined:
                group[member] = joined
        group[node] = joined
    order = {node: at for at, node in enumerate(needs.values)}
    distinct = {id(nodes): nodes for nodes in group.values()}
    return sorted((sorted(nodes, key=order.__getitem__) for nodes in distinct.values()), key=lambda nodes: order[nodes[0]])


def _undecided(needs: _Needs, node: fx.Node) -> Iterable[fx.Node]:
    """The inputs of a recomputable value that the backward does not read, and which may therefore be missing."""
    if node not in needs.recomputable:
        return []
    return [source for source in needs.sources(node) if source not in needs.read]


def _group(needs: _Needs, nodes: list[fx.Node], cost: Cost) -> ValueGroup:
    at = {node: index for index, node in enumerate(nodes)}
    problem = CutProblem(
        nbytes=tuple(_bytes(needs, node) for node in nodes),
        costs=tuple(round(cost(node) * PICOSECONDS) if node in needs.recomputable else None for node in nodes),
        inputs=tuple(tuple(at[source] for source in _undecided(needs, node)) for node in nodes),
        read=tuple(node in needs.read for node in nodes),
    )
    return ValueGroup(tuple(nodes), problem)


def _bytes(needs: _Needs, node: fx.Node) -> int | None:
    """The bytes of saving a value; None for a value that is never saved: a tuple, or a view that can be recomputed."""
    if needs.is_saved_anyway(node):
        return 0
    if not is_tensor(node) or (node in needs.recomputable and is_free(node)):
        return None
    return nbytes(node)
