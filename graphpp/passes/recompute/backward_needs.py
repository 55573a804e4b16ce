"""What the backward of a stage needs of its forward: the values, what keeping one takes, what computing it again takes.

Contract
--------
`backward_needs(joint, stage, may, cost)` has every tensor that the stage's forward makes or receives and its backward
reads, and what those could be computed from again, as far as `may(node)` lets operations run again. Views may always:
a view is never
kept, what it is a view of is. What is at hand (parameters, buffers, inputs, views of them, what is made once per step)
does not appear: it costs nothing. The values come in pieces that do not depend on each other, most of them alike in a
model of equal layers.

Never run again: operators that are not torch's own, collectives, operations that read a buffer which the forward writes.
Random ones draw from the microbatch's key and may. What another stage's backward reads is kept for it anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from graphpp.passes.graph.aliases import is_copy, is_view, shares_memory
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor
from graphpp.passes.graph.op_costs import Cost, nbytes
from graphpp.passes.recompute.min_cut import CutProblem
from graphpp.runtime import program
from graphpp.runtime.randomness import seeded

_PICOSECONDS = 1e12
MayRecompute = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class ValueGroup:
    """Values in order of their making, and the numbers that decide; costs in picoseconds."""

    nodes: tuple[fx.Node, ...]
    shape: CutProblem


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operation may run twice: torch's own operators without an effect, and random ones that take a key."""
    return node.target is seeded or getattr(node.target, "namespace", "") in ("aten", "prims")


def written_buffers(joint: JointGraph) -> set[fx.Node]:
    """The placeholders of buffers that the forward writes: whoever reads one late would read its new value."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    inputs = joint.inputs().items()
    return {node for role, node in inputs if isinstance(role, program.Buffer) and role.fqn in written}


def backward_needs(joint: JointGraph, stage: int, may: MayRecompute, cost: Cost) -> list[ValueGroup]:
    """The pieces of a stage, in order of their first value."""
    found = _Needs(joint, stage, may)
    return [_piece(found, nodes, cost) for nodes in _apart(found)]


class _Needs:
    """The values of a stage: `values` in order, `read` of them in the backward, `again` of them may be computed again."""

    def __init__(self, joint: JointGraph, stage: int, may: MayRecompute) -> None:
        self._stage, self._may = stage, may
        self._fixed = written_buffers(joint)
        self._forward = _members(joint, stage)
        late = {node for role, node in joint.outputs() if isinstance(role, program.Gradient)}
        own = [node for node in joint.computed() if self._is_value(node)]
        self.read = {node for node in own if is_tensor(node) and (self._is_read(node) or (node in late and _here(node, stage)))}
        self.again: set[fx.Node] = set()
        self.values = self._reached(own)

    def _is_value(self, node: fx.Node) -> bool:
        """Whether a forward value exists in this stage and is not at hand."""
        if node.meta["backward"] or node.op != "call_function" or node.meta.get("step_invariant"):
            return False
        return node in self._forward or (node.meta["stage"] is not None and node.meta["stage"] < self._stage)

    def _is_read(self, node: fx.Node) -> bool:
        return any(user.op != "output" and user.meta["backward"] and user.meta["stage"] == self._stage for user in node.users)

    def is_kept_anyway(self, node: fx.Node) -> bool:
        """Whether another stage's backward, which comes later, reads the value."""
        readers = [user.meta["stage"] for user in node.users if user.op != "output" and user.meta["backward"]]
        return node.meta["stage"] == self._stage and any(reader is not None and reader < self._stage for reader in readers)

    def _reached(self, own: list[fx.Node]) -> list[fx.Node]:
        """What is read, and what that could be computed from."""
        repeating: set[fx.Node] = set()
        for node in own:
            if self._can_repeat(node, repeating):
                repeating.add(node)
        wanted = set(self.read)
        for node in reversed(own):
            if node in wanted and node in repeating and not self.is_kept_anyway(node):
                self.again.add(node)
                wanted.update(self.sources(node))
        return [node for node in own if node in wanted]

    def _can_repeat(self, node: fx.Node, repeating: set[fx.Node]) -> bool:
        if node not in self._forward or self._fixed.intersection(node.all_input_nodes):
            return False
        if any(not is_tensor(source) and source not in repeating for source in self.sources(node)):
            return False  # a tuple, or a number, is never kept
        if node.target is operator.getitem:
            return node.all_input_nodes[0] in repeating
        if is_collective(node) or is_wait(node) or not is_repeatable(node):
            return False
        return is_free(node) or self._may(node)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What a value is computed from and is not at hand."""
        return [source for source in node.all_input_nodes if self._is_value(source)]


def is_free(node: fx.Node) -> bool:
    """Whether a value is a view, which costs nothing to make again and nothing more to keep."""
    return shares_memory(node) and not is_wait(node) and not is_copy(node)


def _here(node: fx.Node, stage: int) -> bool:
    return bool(node.meta["stage"] == stage)


def _members(joint: JointGraph, stage: int) -> set[fx.Node]:
    """The operations of a stage's forward, with those that stand wherever they are read; not what is at hand."""
    forward = [node for node in joint.computed() if not node.meta["backward"]]
    members: set[fx.Node] = set()
    for node in reversed(forward):
        if node.meta["stage"] == stage or (node.meta["stage"] is None and not members.isdisjoint(node.users)):
            members.add(node)
    return {node for node in members if not (node.meta["stage"] is None and _of_placeholder(node))}


def _of_placeholder(node: fx.Node) -> bool:
    """Whether a value without a stage is a view of a parameter, a buffer or an input."""
    return node.op == "placeholder" or (is_view(node) and all(map(_of_placeholder, node.all_input_nodes)))


def _apart(found: _Needs) -> list[list[fx.Node]]:
    """The values in groups: one is with those it may be computed from, but for what the backward reads itself."""
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in found.values:
        joined = [node]
        for source in _decisive(found, node):
            joined = joined if group[source] is joined else group[source] + joined
            for member in joined:
                group[member] = joined
        group[node] = joined
    order = {node: at for at, node in enumerate(found.values)}
    distinct = {id(nodes): nodes for nodes in group.values()}
    return sorted((sorted(nodes, key=order.__getitem__) for nodes in distinct.values()), key=lambda nodes: order[nodes[0]])


def _decisive(found: _Needs, node: fx.Node) -> Iterable[fx.Node]:
    """The inputs whose presence is a question where a value is computed again."""
    return [source for source in found.sources(node) if source not in found.read] if node in found.again else []


def _piece(found: _Needs, nodes: list[fx.Node], cost: Cost) -> ValueGroup:
    at = {node: index for index, node in enumerate(nodes)}
    shape = CutProblem(
        nbytes=tuple(_bytes(found, node) for node in nodes),
        costs=tuple(round(cost(node) * _PICOSECONDS) if node in found.again else None for node in nodes),
        inputs=tuple(tuple(at[source] for source in _decisive(found, node)) for node in nodes),
        read=tuple(node in found.read for node in nodes),
    )
    return ValueGroup(tuple(nodes), shape)


def _bytes(found: _Needs, node: fx.Node) -> int | None:
    if found.is_kept_anyway(node):
        return 0
    if not is_tensor(node) or (node in found.again and is_free(node)):
        return None
    return nbytes(node)
