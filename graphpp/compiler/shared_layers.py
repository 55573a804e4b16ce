"""Checks of a graph whose layers several ranks share (tensor parallelism), which these ranks make together."""

from __future__ import annotations

import torch

from graphpp.compiler.request import CompileRequest
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.values_over_ranks import differing_values, plain_arguments, unlike_numbers
from graphpp.runtime.dtensors import is_spread_over
from graphpp.runtime.program import BufferUpdate, Gradient, Loss
from graphpp.runtime.randomness import seeded


def check_shared_layers(request: CompileRequest, joint: JointGraph) -> None:
    """Raise `CaptureError` where the ranks that share layers would go on with values that differ, and must not.

    These are: random numbers for a sharded value, of which each rank would draw one process's first ones; a gradient of a whole
    parameter, the new value of a whole buffer, or the loss, if it is computed from sharded values. Called by all ranks that
    share layers, for their own graphs of one call, after `key_random_ops`.
    """
    layers = request.place.tp_group
    if layers is None:
        return
    agreement, own = request.place.agreement(layers), plain_arguments(joint.graph)
    nodes = max(agreement.largest([len(own)]))
    numbers = torch.tensor([*own, *[-1] * (nodes - len(own))], dtype=torch.int64, device="cpu")
    others = agreement.of_all(numbers)
    unlike = unlike_numbers(own, [[number for number in row if number >= 0] for row in others.tolist()])
    tensors = (*request.model.named_parameters(), *request.model.named_buffers())
    sharded = {fqn for fqn, tensor in tensors if is_spread_over(tensor, layers)}
    differing = differing_values(joint.graph, sharded, unlike, layers.group_name)
    for node in joint.computed():
        if node.target is seeded and node in differing:
            raise CaptureError(
                f"{node.args[2]} in {describe_node(node)} draws random numbers for values that are spread over the ranks of "
                "tp: each rank would draw the same numbers for its part, where one process draws others for every part. Draw "
                "(dropout) where the values are whole, or set the probability to 0."
            )
    fine = sharded | joint.partial.keys()  # partial gradients are added up by the runtime
    for role, node in joint.outputs() if joint.training else ():
        whole = isinstance(role, Loss) or (isinstance(role, Gradient | BufferUpdate) and role.fqn not in fine)
        if whole and node in differing:
            raise CaptureError(_UNEQUAL[type(role)].format(getattr(role, "fqn", ""), describe_node(node)))


_REMEDY = "Redistribute the values before, as the styles of torch.distributed.tensor.parallel do"
_UNEQUAL: dict[type, str] = {
    Loss: "the loss is computed from values that are spread over the ranks of tp, so ranks would have other losses{}, at {}. "
    f"{_REMEDY} (output_layouts=Replicate())",
    Gradient: "every rank of tp has the whole parameter {}, and uses the parameter for values that are spread over tp, at {}: "
    "each rank would have a part of the gradient. Make the parameter a DTensor; for a norm, put SequenceParallel() in the plan "
    "of parallelize_module",
    BufferUpdate: "every rank of tp has the whole buffer {}, and the forward writes values that are spread over tp, at {}. "
    f"{_REMEDY}",
}
