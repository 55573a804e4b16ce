"""Checks of a graph whose layers several ranks share (tensor parallelism), which these ranks make together."""

from __future__ import annotations

import torch

from graphpp.compiler.request import CompileRequest
from graphpp.errors import CaptureError
from graphpp.parallel.agreement import Agreement
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.values_over_ranks import differing_values, plain_arguments
from graphpp.runtime.randomness import seeded
from graphpp.runtime.shards.layer_parts import layer_part


def refuse_sharded_draws(request: CompileRequest, joint: JointGraph) -> None:
    """Raise `CaptureError` for random numbers in a sharded region, where each rank would draw one process's first ones.

    Called by all ranks that share layers, for their own graphs of one call, after `key_random_ops`. Where all ranks have equal
    values they draw equal numbers, from one key, as one process does.
    """
    layers = request.place.tensor
    if layers is None:
        return
    agreement, own = Agreement(layers, request.place.device), plain_arguments(joint.graph)
    nodes = int(agreement.largest(torch.tensor([len(own)], dtype=torch.int64, device="cpu")))
    numbers = torch.tensor([*own, *[-1] * (nodes - len(own))], dtype=torch.int64, device="cpu")
    others = agreement.of_all(numbers)
    unlike = set((others != others[0]).any(0).nonzero().flatten().tolist())
    tensors = (*request.model.named_parameters(), *request.model.named_buffers())
    parts = ((fqn, layer_part(tensor)) for fqn, tensor in tensors)
    sharded = {fqn for fqn, part in parts if part is not None and not part.is_whole}
    differing = differing_values(joint.graph, sharded, unlike, layers.group_name)
    for node in joint.computed():
        if node.target is seeded and node in differing:
            raise CaptureError(
                f"{node.args[2]} in {describe_node(node)} draws random numbers for values that are spread over the ranks of "
                "tp: each rank would draw the same numbers for its part, where one process draws others for every part. Draw "
                "(dropout) where the values are whole, or set the probability to 0."
            )
