"""Refuse graphs in which ranks along `tp`, or experts along `ep`, would continue with wrongly differing values.

`check_shared_layers` is collective over the ranks that share layers and runs after `key_random_ops`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import fx

from graphpp._torch.distributed import group_named
from graphpp.compiler.request import CompileRequest
from graphpp.errors import CaptureError
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.graph.collectives import group_of, is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.values_over_ranks import differing_values, plain_arguments, unlike_numbers
from graphpp.runtime.dtensors import is_cut_along, is_expert, is_spread_over
from graphpp.runtime.program import BufferUpdate, Gradient, Input, Loss, Parameter
from graphpp.runtime.random_keys import seeded

_GATHER, _ALL_TO_ALL, _ADD = "all_gather", "all_to_all", "aten::add"
_SENDS = _ALL_TO_ALL, "reduce_scatter"
_ETP = 1  # the position of `etp` in the mesh of an expert
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


def check_shared_layers(request: CompileRequest, joint: JointGraph) -> None:
    """Raise `CaptureError` if ranks along `tp` would continue with different values.

    That happens if random numbers are drawn for a sharded value (each rank would draw the first shard's numbers), or if the
    loss, the gradient of a whole parameter or the update of a whole buffer is computed from sharded values. Ranks along `tp`
    that send equal tokens to an expert would each add to its gradient.
    """
    place, layers = request.place, request.place.tp_group
    if layers is None:
        return
    agreement, own = request.place.agreement(layers), plain_arguments(joint.graph)
    nodes = max(agreement.largest([len(own)]))
    numbers = torch.tensor([*own, *[-1] * (nodes - len(own))], dtype=torch.int64, device="cpu")
    others = agreement.of_all(numbers)
    unlike = unlike_numbers(own, [[number for number in row if number >= 0] for row in others.tolist()])
    tensors = (*request.model.named_parameters(), *request.model.named_buffers())
    experts = {fqn: tensor for fqn, tensor in tensors if place.folds_experts and is_expert(tensor, place)}
    along = {} if place.experts is None else place.experts.along
    among_layers = [dim for dim, group in along.items() if _peers(group, layers) > 1]
    sharded = {fqn for fqn, tensor in tensors if is_spread_over(tensor, layers)}
    sharded |= {fqn for fqn, tensor in experts.items() if any(is_cut_along(tensor, dim) for dim in among_layers)}
    differing = differing_values(joint.graph, sharded, unlike, _several(joint, layers))
    if place.tp_adds_to_experts:
        _check_tokens(place, joint, differing)
    for node in joint.computed():
        if node.target is seeded and node in differing:
            raise CaptureError(
                f"{node.args[2]} in {describe_node(node)} draws random numbers for values that are spread over the ranks of "
                "tp: each rank would draw the same numbers for its part, where one process draws others for every part. Draw "
                "(dropout) where the values are whole, or set the probability to 0."
            )
    fine = sharded | experts.keys() | joint.partial.keys()  # the runtime sums partial gradients, and those of equal experts
    for role, node in joint.outputs() if joint.training else ():
        whole = isinstance(role, Loss) or (isinstance(role, Gradient | BufferUpdate) and role.fqn not in fine)
        if whole and node in differing:
            raise CaptureError(_UNEQUAL[type(role)].format(getattr(role, "fqn", ""), describe_node(node)))


def _check_tokens(place: RankPlace, joint: JointGraph, differing: Collection[fx.Node]) -> None:
    """Raise `CaptureError` for an exchange with ranks of experts of values that ranks along `tp` have alike."""
    for node in filter(is_collective, joint.graph.nodes):
        sends = any(kind in node.name for kind in _SENDS) and _peers(group_named(group_of(node)), place.experts_group) > 1
        if sends and not any(source in differing for source in node.all_input_nodes):
            raise CaptureError(
                f"every rank along tp has the same tokens for the experts, in {describe_node(node)}, and the gradients of all "
                "these ranks are added up: shard the tokens over tp before (Shard(1) of a DTensor [batch, sequence, width], by "
                "PrepareModuleInput)"
            )


def _peers(one: dist.ProcessGroup | None, other: dist.ProcessGroup | None) -> int:
    """The number of ranks that two groups share."""
    ranks = [set() if group is None else set(dist.get_process_group_ranks(group)) for group in (one, other)]
    return len(ranks[0] & ranks[1])


def check_gathered_experts(request: CompileRequest, joint: JointGraph) -> None:
    """Raise `CaptureError` for experts whose gradients come from a rank's own tokens, and must come from other ranks' too.

    An expert may be all-gathered over `ep` or `etp` while no collective sums its gradient: `DTensor.full_tensor()` without
    `grad_placements` assumes that all ranks have the whole gradient, but each rank computes it from different rows. Ranks along
    `etp` may compute without each other's tokens, or have a parameter whole without a sum of its gradient.
    """
    place = request.place
    if place.experts is None:
        return
    own = {fqn: each for fqn, each in request.model.named_parameters() if is_expert(each, place)}
    inputs = {role.fqn: node for role, node in joint.inputs().items() if isinstance(role, Parameter)}
    names = {dim: (name, place.name_along(name)) for dim, name in enumerate(place.expert_dims) if dim in place.experts.along}
    tokens = _other_tokens(place, joint) if _ETP in names else set[fx.Node]()
    for role, gradient in joint.outputs():
        if isinstance(role, Gradient) and role.fqn in own:
            for name, group in names.values():
                _check_gathered(role.fqn, inputs[role.fqn], gradient, name, group)
            if _ETP in names:
                _check_shared_expert(role.fqn, own[role.fqn], inputs[role.fqn], gradient, names[_ETP][1], tokens)


def _check_gathered(fqn: str, parameter: fx.Node, gradient: fx.Node, name: str, group: str) -> None:
    gathers = [node for node in _readers(parameter) if _is_over(node, group) and _GATHER in node.name]
    if gathers and not any(_is_over(node, group) for node in _makers(gradient)):
        raise CaptureError(
            f"the forward gathers the experts {fqn} over {name} in {describe_node(gathers[0])}, and each rank would "
            "keep the gradient of its own rows alone: compute with weight.to_local(), or gather by "
            "weight.full_tensor(grad_placements=[Partial()]), which adds the gradients of all ranks up"
        )


def _other_tokens(place: RankPlace, joint: JointGraph) -> set[fx.Node]:
    """The values of tokens that ranks along `etp` do not share; ranks that share layers too begin with equal tokens."""
    assert place.experts is not None, "experts are shared"
    group = place.experts.along[_ETP]
    if _peers(group, place.tp_group) == dist.get_world_size(group):
        return set()
    begin = [at for at, node in enumerate(joint.graph.nodes) if isinstance(node.meta.get("role"), Input)]
    return differing_values(joint.graph, (), begin, _several(joint, group))


def _several(joint: JointGraph, group: dist.ProcessGroup) -> dict[str, bool]:
    """The names of the model's groups that have several of the ranks of a group, and whether they have all."""
    names = {group_of(node) for node in filter(is_collective, joint.graph.nodes)}
    shared = {name: _peers(group_named(name), group) for name in names}
    return {name: count == dist.get_world_size(group) for name, count in shared.items() if count > 1}


def _check_shared_expert(
    fqn: str, parameter: torch.Tensor, node: fx.Node, gradient: fx.Node, group: str, others: set[fx.Node]
) -> None:
    """Of a parameter over `ep` and `etp`. `group`: the name of the group along `etp`; `others`: tokens that are not shared."""
    alone = next((each for each in _readers(node) if not each.meta["backward"] and others & {*each.all_input_nodes}), None)
    if alone is not None:
        raise CaptureError(
            f"ranks along etp share the expert {fqn}, and each would train it with its own tokens alone, in "
            f'{describe_node(alone)}: give experts.routed tensor_group=expert_mesh.get_group("etp") beside '
            'group=expert_mesh.get_group("ep")'
        )
    if not is_cut_along(parameter, _ETP) and not any(_is_over(each, group) for each in _makers(gradient)):
        raise CaptureError(
            f"every rank along etp has the parameter {fqn} whole, and would keep its own part of the gradient: read the "
            "parameter by weight.to_local(grad_placements=[Shard(0), Partial()]), which adds the parts up"
        )


def _is_over(node: fx.Node, group: str) -> bool:
    return is_collective(node) and group_of(node) == group


def _readers(value: fx.Node) -> list[fx.Node]:
    """The operations that read a value, directly or through views, casts and the like."""
    found = list(value.users)
    for node in found:
        if _passes(node):
            found += [user for user in node.users if user not in found]
    return found


def _makers(value: fx.Node) -> list[fx.Node]:
    """The operations that make a value, looking through sums, waits, views and the like."""
    found = [value]
    for node in found:
        if _passes(node) or is_wait(node) or getattr(getattr(node.target, "_schema", None), "name", "") == _ADD:
            found += [source for source in node.all_input_nodes if source not in found]
    return found


def _passes(node: fx.Node) -> bool:
    """Whether an operation takes one tensor, such as a view, a cast or a padding."""
    return node.op == "call_function" and len(node.all_input_nodes) == 1 and not is_collective(node)
