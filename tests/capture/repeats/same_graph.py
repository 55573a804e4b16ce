"""The first difference between two joint graphs, node by node: operators, arguments, values, metadata, roles and names.

Names are compared without their numbers, since torch counts the nodes that it removes, too; positions by their order; sequence
numbers by the forward node that each backward node belongs to.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphpp.capture.repeats.proof import layouts
from graphpp.passes.graph.joint_graph import JointGraph

META = ("backward", "calls", "source", "checkpoint", "kept", "role")


def difference(one: JointGraph, other: JointGraph) -> str | None:
    """None if both graphs are equal."""
    if len(one.graph.nodes) != len(other.graph.nodes):
        return f"{len(one.graph.nodes)} and {len(other.graph.nodes)} nodes"
    facts = [_facts(joint) for joint in (one, other)]
    for a, b, mine, theirs in zip(one.graph.nodes, other.graph.nodes, *facts, strict=True):
        if mine != theirs:
            return f"{a.format_node()} {mine}\nagainst {b.format_node()} {theirs}"
    outside = [
        (joint.training, joint.parameters, joint.buffers, list(joint.constants), [role for role, _ in joint.outputs()])
        for joint in (one, other)
    ]
    return None if outside[0] == outside[1] else f"{outside[0]}\nagainst {outside[1]}"


def _facts(joint: JointGraph) -> list[Any]:
    """Per node, everything that is compared; nodes that are read are given by their places in the graph."""
    place = {node: f"node {at}" for at, node in enumerate(joint.graph.nodes)}
    forward = [node for node in joint.computed() if not node.meta["backward"]]
    assert [node.meta["position"] for node in forward] == sorted(node.meta["position"] for node in forward)
    first: dict[int, str] = {}
    for node in forward:
        first.setdefault(node.meta["seq"], place[node])
    found = []
    for node in joint.graph.nodes:
        reads = repr(fx.node.map_arg((node.args, node.kwargs), lambda source: _Place(place[source])))
        target = "" if node.op == "placeholder" else node.target
        twin = first.get(node.meta["seq"]) if node.meta.get("backward") and node.op == "call_function" else None
        name = node.name.rstrip("_0123456789")
        found.append([node.op, target, name, reads, twin, layouts(node.meta.get("val")), *map(node.meta.get, META)])
    return found


class _Place(str):
    """The place of a node among the arguments of another one."""
