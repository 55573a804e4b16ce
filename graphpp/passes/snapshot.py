"""Snapshot written buffers: the backward reads what the forward read.

Contract: afterwards no backward node reads a buffer that the graph writes; it reads a copy that the forward made before
the write. (The runtime writes new buffer values at the end of a forward, so the placeholder holds the new value by the
time the backward runs.)
"""

from __future__ import annotations

import torch

from graphpp.passes.joint import JointGraph
from graphpp.runtime import program


def snapshot(joint: JointGraph) -> JointGraph:
    """Insert one copy per written buffer that the backward reads; changes the graph in place."""
    written = {program.Buffer(role.fqn) for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    for role, buffer in joint.inputs().items():
        late = [user for user in buffer.users if user.op != "output" and user.meta["backward"]]
        early = [user for user in buffer.users if user.op != "output" and not user.meta["backward"]]
        if role not in written or not late:
            continue
        reader = early[0] if early else next(joint.computed())
        with joint.graph.inserting_before(reader):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (buffer,))
        copy.meta = {**reader.meta, "val": buffer.meta["val"]}
        for user in late:
            user.replace_input_with(buffer, copy)
    return joint
