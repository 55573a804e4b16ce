"""Rematerialize single values: the backward of a stage recomputes them where it first reads them; they are not saved.

Contract
--------
`recomputed[stage]` names forward values (see `choose_saved.py`). Afterwards the stage's backward reads a copy of each. The
copy stands right before its first reader and is computed from values that are saved, at hand, or copied themselves. Each value
has at most one copy in a stage, marked `meta["recomputed"]`. The forward loses the nodes that only the backward had read.

Bit-preserving: the copies run the same operators on the same values. The same values cross each boundary as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, reached, remove_unused
from graphpp.passes.recompute.choose_saved import RecomputedByStage
from graphpp.runtime import program


def rematerialize(joint: JointGraph, recomputed: RecomputedByStage) -> JointGraph:
    """Let the backward of every stage recompute the named values, in place; nodes carry `meta["stage"]`."""
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    copies = [_Copies(joint.graph, order, stage, values) for stage, values in enumerate(recomputed)]
    for reader in list(joint.computed()):
        if reader.meta["backward"] and reader.meta["stage"] is not None:
            of_stage = copies[reader.meta["stage"]]
            for node in reader.all_input_nodes:
                if node in of_stage.values:
                    reader.replace_input_with(node, of_stage.before(reader, node))
    end, outputs = joint.graph.output_node(), joint.outputs()
    for at, (role, node) in enumerate(outputs):
        if isinstance(role, program.Gradient) and node.meta["stage"] is not None:
            outputs[at] = (role, copies[node.meta["stage"]].before(end, node))
    joint.set_outputs(outputs)
    remove_unused(joint.graph)
    return joint


class _Copies:
    """The copies of `values` in the backward of one stage; `order` has the place of each value in the graph."""

    def __init__(self, graph: fx.Graph, order: Mapping[fx.Node, int], stage: int, values: set[fx.Node]) -> None:
        self.values = values
        self._graph, self._order, self._stage, self._copies = graph, order, stage, dict[fx.Node, fx.Node]()

    def before(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """The copy of a value, inserted before `reader` at the first call; a value that is not to be recomputed itself."""
        if node in self.values and node not in self._copies:
            self._copy(reader, node)
        return self._copies.get(node, node)

    def _copy(self, reader: fx.Node, node: fx.Node) -> None:
        """Copy a value, and the values that it is recomputed from, to right before `reader`."""

        def missing(node: fx.Node) -> list[fx.Node]:
            return [source for source in node.all_input_nodes if source in self.values and source not in self._copies]

        with self._graph.inserting_before(reader):
            for each in sorted(reached([node], missing), key=self._order.__getitem__):
                copy = self._graph.node_copy(each, lambda source: self._copies.get(source, source))
                copy.meta = {**each.meta, "stage": self._stage, "backward": True, "position": -1, "recomputed": True}
                self._copies[each] = copy
