"""Refuse experts that a forward gathers over `ep`, with gradients from this rank's rows alone.

`DTensor.full_tensor()` without `grad_placements` takes the gradient of the whole tensor to be equal on all ranks, as it is
along `tp`. Along `ep` each rank computes the gradient from rows of its own, and the ranks' gradients must be added up.
"""

from __future__ import annotations

from torch import fx

from graphpp.compiler.request import CompileRequest
from graphpp.errors import CaptureError
from graphpp.passes.graph.collectives import group_of, is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.runtime.dtensors import is_spread_over
from graphpp.runtime.program import Gradient, Parameter

_GATHER, _ADD = "all_gather", "aten::add"


def check_gathered_experts(request: CompileRequest, joint: JointGraph) -> None:
    """Raise `CaptureError` for an expert that an all-gather over `ep` reads, and whose gradient no collective adds up."""
    group = request.place.experts_group
    if group is None:
        return
    parameters = {fqn: each for fqn, each in request.model.named_parameters() if is_spread_over(each, group)}
    inputs = {role.fqn: node for role, node in joint.inputs().items() if isinstance(role, Parameter)}
    for role, gradient in joint.outputs():
        if isinstance(role, Gradient) and role.fqn in parameters:
            gathers = [node for node in _readers(inputs[role.fqn]) if _is_over(node, group.group_name) and _GATHER in node.name]
            if gathers and not any(_is_over(node, group.group_name) for node in _makers(gradient)):
                raise CaptureError(
                    f"the forward gathers the experts {role.fqn} over ep in {describe_node(gathers[0])}, and each rank would "
                    "keep the gradient of its own rows alone: compute with weight.to_local(), or gather by "
                    "weight.full_tensor(grad_placements=[Partial()]), which adds the gradients of all ranks up"
                )


def _is_over(node: fx.Node, group: str) -> bool:
    return is_collective(node) and group_of(node) == group


def _readers(value: fx.Node) -> list[fx.Node]:
    """The operations that read a value, or its copy in another form."""
    found = list(value.users)
    for node in found:
        if _passes(node):
            found += [user for user in node.users if user not in found]
    return found


def _makers(value: fx.Node) -> list[fx.Node]:
    """The operations that make a value, seen through sums and other forms of it."""
    found = [value]
    for node in found:
        if _passes(node) or is_wait(node) or getattr(getattr(node.target, "_schema", None), "name", "") == _ADD:
            found += [source for source in node.all_input_nodes if source not in found]
    return found


def _passes(node: fx.Node) -> bool:
    """Whether an operation takes one tensor, such as a view, a cast or a padding."""
    return node.op == "call_function" and len(node.all_input_nodes) == 1 and not is_collective(node)
