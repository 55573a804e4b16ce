"""Snapshot written buffers: whoever reads a buffer late reads its old value.

Contract: the runtime writes a buffer's new value into its memory at the end of the forward. Afterwards nothing that is
read later lies in that memory: no backward node reads a buffer that the graph writes, no view of it exists (it could be
saved, sent or returned), and it is no result but its own update. All these read a copy that the forward made.
"""

from __future__ import annotations

import torch
from torch import fx

from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime import program


def snapshot_buffers(joint: JointGraph) -> JointGraph:
    """Insert one copy per written buffer that is read late; changes the graph in place."""
    updates = {role: node for role, node in joint.outputs() if isinstance(role, program.BufferUpdate)}
    inputs = joint.inputs()
    for own, update in updates.items():
        if program.Buffer(own.fqn) in inputs:
            _snapshot(joint, own, inputs[program.Buffer(own.fqn)], update)
    return joint


def _snapshot(joint: JointGraph, own: program.BufferUpdate, buffer: fx.Node, update: fx.Node) -> None:
    readers = [node for node in joint.computed() if buffer in node.all_input_nodes]
    late = [node for node in readers if node.meta["backward"] or shares_memory(node)]
    if not late and all(node is not buffer or role == own for role, node in joint.outputs()):
        return
    copy = _copy(joint, buffer, [*readers, update, *joint.computed()])
    for reader in late:
        reader.replace_input_with(buffer, copy)
    joint.set_outputs([(role, copy if node is buffer and role != own else node) for role, node in joint.outputs()])


def _copy(joint: JointGraph, buffer: fx.Node, places: list[fx.Node]) -> fx.Node:
    """A copy of the buffer, made right before the first of `places` that is a forward operation, as a part of it."""
    place = next(node for node in places if node.op != "placeholder" and not node.meta["backward"])
    with joint.graph.inserting_before(place):
        copy = joint.graph.call_function(torch.ops.aten.clone.default, (buffer,))
    copy.meta = {**place.meta, "val": buffer.meta["val"]}
    return copy
