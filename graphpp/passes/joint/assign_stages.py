"""Assign every node its stage, `meta["stage"]`; `None` for a value that every stage that reads it computes itself.

Contract:
- A forward node's stage follows from its position: stage s begins at the first operation of the module call that the split
  names.
- `None`: views of parameters, and cheap values that depend on no parameter, written buffer, random number or value with a stage
  (masks, rotary tables, position ids).
- The waits for a collective run in its stage.
- A backward node runs in the stage of its forward twin (same autograd sequence number), but never in a later stage than a
  gradient that it reads. So a sum of gradients runs in the lowest stage among its terms.
- A backward value with a data-dependent size cannot be sent, so it is computed in the stage that reads it.
- Afterwards, along every edge, stages of forward nodes do not fall and stages of backward nodes do not rise.

Raises `CaptureError` if a buffer or frozen parameter is written in one stage and read in another.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence

from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp.errors import CaptureError
from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, describe_node, is_check
from graphpp.passes.graph.op_costs import is_heavy
from graphpp.runtime import program

_OF_ONE_STAGE = (program.Seed(), program.RandomKey())  # inputs from which only a stage computes


def assign_stages(joint: JointGraph, starts: Sequence[int]) -> JointGraph:
    """Set every node's stage, in place; stage s begins at position `starts[s]` of the forward, and starts[0] = 0."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    twins: dict[int, int | None] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" or _is_replicable(node, written):
            node.meta["stage"] = None
        elif node.meta["backward"]:
            node.meta["stage"] = _backward_stage(node, twins, len(starts) - 1)
        else:
            node.meta["stage"] = _forward_stage(node, starts)
        if not node.meta["backward"]:
            twins.setdefault(node.meta.get("seq", -1), node.meta["stage"])
    _move_to_readers([node for node in joint.computed() if node.meta["backward"] and node.meta["stage"] is not None])
    _check(joint, written)
    return joint


def _move_to_readers(backward: Sequence[fx.Node]) -> None:
    """Move nodes whose value cannot be sent to the stage of their earliest reader, and their other readers with them."""
    decided = [node for node in backward if has_unknown_size(node.meta["val"])]
    moved = bool(decided)
    while moved:
        moved = False
        for node in reversed(decided):
            moved |= _lower(node, [user.meta["stage"] for user in node.users if user.op != "output"])
        for node in backward if moved else ():
            _lower(node, [source.meta["stage"] for source in stage_inputs(node) if source.meta["backward"]])


def _lower(node: fx.Node, stages: Sequence[int | None]) -> bool:
    own, known = node.meta["stage"], [stage for stage in stages if stage is not None]
    node.meta["stage"] = min([own, *known])
    return bool(node.meta["stage"] != own)


def stage_inputs(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.meta["stage"] is not None]


def _forward_stage(node: fx.Node, starts: Sequence[int]) -> int:
    stages: list[int] = [source.meta["stage"] for source in stage_inputs(node)]
    if _is_of_its_input(node) and stages:
        return stages[0]
    return max([bisect_right(starts, node.meta["position"]) - 1, *stages])


def _backward_stage(node: fx.Node, twins: dict[int, int | None], last: int) -> int:
    gradients: list[int] = [source.meta["stage"] for source in stage_inputs(node) if source.meta["backward"]]
    if _is_of_its_input(node) and gradients:
        return gradients[0]
    twin = twins.get(node.meta["seq"])
    if twin is not None:
        return min([twin, *gradients])
    kept = [source.meta["stage"] for source in stage_inputs(node) if not source.meta["backward"]]
    return min(gradients) if gradients else max(kept, default=last)


def _is_of_its_input(node: fx.Node) -> bool:
    """Whether a node must run in its input's stage: a tuple, or a collective's result before its wait, cannot be sent."""
    return node.target is operator.getitem or is_wait(node)


def _is_replicable(node: fx.Node, written: set[str]) -> bool:
    """Whether every stage can compute a value itself, more cheaply than by receiving it."""
    if any(source.meta["stage"] is not None or source.meta.get("role") in _OF_ONE_STAGE for source in node.all_input_nodes):
        return False
    if is_heavy(node) or is_check(node) or is_collective(node):
        return False
    return all(_is_plain(source, written, node) for source in node.all_input_nodes)


def _is_plain(source: fx.Node, written: set[str], reader: fx.Node) -> bool:
    """Whether any stage may read `source`: inputs, constants, unwritten buffers; parameters only through views."""
    role = source.meta.get("role")
    if isinstance(role, program.Buffer):
        return role.fqn not in written
    return not from_parameter(source) or is_view(reader)


def from_parameter(node: fx.Node) -> bool:
    """Whether a node without a stage is a parameter or a view of one."""
    while node.op != "placeholder":
        if not is_view(node) or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return isinstance(node.meta.get("role"), program.Parameter)


def _check(joint: JointGraph, written: set[str]) -> None:
    for node in (node for node in joint.computed() if node.meta["stage"] is not None):
        for source in (source for source in stage_inputs(node) if source.meta["backward"] == node.meta["backward"]):
            step = node.meta["stage"] - source.meta["stage"]
            assert (step <= 0) if node.meta["backward"] else (step >= 0), f"{node} is before its input {source}"
    _check_written_buffers(joint, written)


def _check_written_buffers(joint: JointGraph, written: set[str]) -> None:
    """Raise `CaptureError` unless all readers of a written buffer share the stage of its update, if that has one."""
    inputs = joint.inputs()
    for role, update in joint.outputs():
        if not isinstance(role, program.BufferUpdate) or program.Buffer(role.fqn) not in inputs:
            continue
        readers = [node for node in inputs[program.Buffer(role.fqn)].users if node.op != "output"]
        users = [update, *readers] if update.meta["stage"] is not None else readers
        for reader in readers:
            if reader.meta["stage"] != users[0].meta["stage"]:
                raise CaptureError(
                    f"the buffer or frozen parameter {role.fqn} is written in stage {users[0].meta['stage']} at "
                    f"{describe_node(users[0])} and read in stage {reader.meta['stage']} at {describe_node(reader)}: move the "
                    "cut so that both fall into one stage."
                )
