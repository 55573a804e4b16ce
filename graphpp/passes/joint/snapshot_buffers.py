"""Snapshot written buffers: operations that read a buffer after the forward read a copy of its old value.

Contract: at the end of the forward the runtime writes a buffer's new value into the buffer's memory. So afterwards no backward
node reads a buffer that the graph writes, no view of the buffer exists (a view could be saved, sent or returned), and the
buffer is no result, except its own update. All such readers read one copy, which the forward makes.
"""

from __future__ import annotations

import torch
from torch import fx

from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime import program


def snapshot_buffers(joint: JointGraph) -> JointGraph:
    updates = {role: node for role, node in joint.outputs() if isinstance(role, program.BufferUpdate)}
    inputs = joint.inputs()
    for own, update in updates.items():
        if program.Buffer(own.fqn) in inputs:
            _snapshot(joint, own, inputs[program.Buffer(own.fqn)], update)
    return joint


def _snapshot(joint: JointGraph, own: program.BufferUpdate, buffer: fx.Node, update: fx.Node) -> None:
    readers = [node for node in joint.computed() if buffer in node.all_input_nodes]
    later = [node for node in readers if node.meta["backward"] or shares_memory(node)]
    if not later and all(node is not buffer or role == own for role, node in joint.outputs()):
        return
    copy = _copy(joint, buffer, [*readers, update, *joint.computed()])
    for reader in later:
        reader.replace_input_with(buffer, copy)
    joint.set_outputs([(role, copy if node is buffer and role != own else node) for role, node in joint.outputs()])


def _copy(joint: JointGraph, buffer: fx.Node, places: list[fx.Node]) -> fx.Node:
    """A copy of the buffer before the first forward operation among `places`, with the metadata of that operation."""
    place = next(node for node in places if node.op != "placeholder" and not node.meta["backward"])
    with joint.graph.inserting_before(place):
        copy = joint.graph.call_function(torch.ops.aten.clone.default, (buffer,))
    copy.meta = {**place.meta, "val": buffer.meta["val"]}
    return copy
