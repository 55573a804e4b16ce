"""Rematerialize: the backward makes values of the forward again where it reads them, and so they need not be saved.

Contract
--------
`again[stage]` names forward values (see `savings.py`). Afterwards the stage's backward reads a copy of each, made right
before its first reader and dead after its last, from values that are saved, at hand, or copied themselves. Each has at most
one copy in a stage, marked `meta["recomputed"]`. What only the backward had read is gone from the forward.

Bit-preserving: the copies are the same operators on the same values. What crosses a boundary stays the same.
"""

from __future__ import annotations

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, remove_unused
from graphpp.passes.recompute.choose_saved import RecomputedByStage
from graphpp.runtime import program


def rematerialize(joint: JointGraph, again: RecomputedByStage) -> JointGraph:
    """Let the backward of every stage make these values again, in place; nodes carry `meta["stage"]`."""
    copies = [_Copies(joint, stage, wanted) for stage, wanted in enumerate(again)]
    for reader in list(joint.computed()):
        if reader.meta["backward"] and reader.meta["stage"] is not None:
            made = copies[reader.meta["stage"]]
            for node in reader.all_input_nodes:
                if node in made.wanted:
                    reader.replace_input_with(node, made.before(reader, node))
    end = joint.graph.output_node()
    late = [isinstance(role, program.Gradient) and node.meta["stage"] is not None for role, node in joint.outputs()]
    joint.set_outputs(
        [
            (role, copies[node.meta["stage"]].before(end, node) if is_late else node)
            for is_late, (role, node) in zip(late, joint.outputs(), strict=True)
        ]
    )
    remove_unused(joint.graph)
    return joint


class _Copies:
    """The copies in one stage's backward."""

    def __init__(self, joint: JointGraph, stage: int, wanted: set[fx.Node]) -> None:
        self.wanted = wanted
        self._graph, self._stage, self._made = joint.graph, stage, dict[fx.Node, fx.Node]()
        self._order = {node: at for at, node in enumerate(joint.graph.nodes)} if wanted else {}

    def before(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """The copy of a value, made in front of `reader` if it is the first; the value itself if it is not wanted."""
        if node in self.wanted and node not in self._made:
            self._copy(reader, node)
        return self._made.get(node, node)

    def _copy(self, reader: fx.Node, node: fx.Node) -> None:
        missing = {node}
        pending = [node]
        while pending:
            new = [s for s in pending.pop().all_input_nodes if s in self.wanted and s not in self._made and s not in missing]
            missing.update(new)
            pending += new
        with self._graph.inserting_before(reader):
            for each in sorted(missing, key=self._order.__getitem__):
                copy = self._graph.node_copy(each, lambda source: self._made.get(source, source))
                copy.meta = {**each.meta, "stage": self._stage, "backward": True, "position": -1, "recomputed": True}
                self._made[each] = copy
