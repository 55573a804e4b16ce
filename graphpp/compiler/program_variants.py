"""The kinds of stage programs that tables run, and the passes that each kind takes.

Contract
    in   the request, the captured joint graph, a checked table
    out  `ProgramVariant`: which phases the programs have; `LoweringOptions`: the passes, as the options and the table say
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.backends.compilers import workspace_of
from graphpp.capture import activation_checkpoints as checkpoints
from graphpp.compiler.request import CompileRequest
from graphpp.options.recompute import Recompute
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.lower import LoweringOptions
from graphpp.passes.stage.gather_layers import RankGroup, ShardedLayers
from graphpp.planner import recompute_policy as policy
from graphpp.planner.layers import layer_or_call, module_calls
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.dtensors import is_spread_over
from graphpp.runtime.fsdp.precision import Precision


@dataclass(frozen=True)
class ProgramVariant:
    """The kinds of stage programs that a table runs. The same joint graph gives one set of programs for each variant.

    `split_backward`: the backward also comes as input gradient (I) and weight gradient (W). `recomputed`: values that the
    option `recompute` names are computed again in the backward, not saved.
    """

    split_backward: bool
    recomputed: bool


def variant_of(request: CompileRequest, table: CheckedTable) -> ProgramVariant:
    """The kind of programs that a table asks for first."""
    recomputed = table.recomputed_stages(request.options.memory.recompute is not None)
    return ProgramVariant(table.splits_backward, any(recomputed))


def choices_of(request: CompileRequest, joint: JointGraph, variant: ProgramVariant) -> LoweringOptions:
    """The passes that make the programs of a variant, and their settings."""
    options, place = request.options, request.place
    recompute = options.memory.recompute or Recompute()
    region = policy.region_of(recompute, module_calls(joint)) if variant.recomputed and joint.training else None
    savings = policy.recompute_budget(recompute, region, place.device.type, options.parallel.node_seconds())
    whole = region if recompute.fraction is None else None  # a budget chooses single values, not whole layers
    whole, chosen = checkpoints.add_checkpoint_regions(joint, whole, policy.may_recompute(recompute))
    rerun, layers = policy.may_repeat_in_weight_grad(recompute), _sharded_layers(request, joint)
    fused = options.fused and layers is None  # a gradient leaves at once, so there is no sum to multiply into
    shared_by = None if place.tp_group is None else place.tp_group.group_name
    workspace = workspace_of(options.backend)
    return LoweringOptions(
        variant.split_backward, rerun, whole, chosen, savings, fused, options.hoists, layers, shared_by, workspace
    )


def _sharded_layers(request: CompileRequest, joint: JointGraph) -> ShardedLayers | None:
    """How programs gather single layers; None where they are given whole parameters."""
    sharding, parallel = request.place.sharding, request.options.parallel
    if sharding is None or parallel.keep != 0:
        return None
    dtypes = {fqn: each.dtype for fqn, each in request.model.named_parameters(remove_duplicate=False)}
    precision = Precision(parallel.param_dtype, parallel.reduce_dtype)
    layer_of = layer_or_call(module_calls(joint))
    experts, others = request.place.experts, dict[str, RankGroup]()
    if experts is not None and experts.sharding is not None:
        group = RankGroup(experts.sharding.group.group_name, experts.sharding.ranks)
        named = request.model.named_parameters(remove_duplicate=False)
        others = {fqn: group for fqn, each in named if is_spread_over(each, experts.group)}
    return ShardedLayers(sharding.group.group_name, sharding.ranks, dtypes, precision.of_messages, layer_of, others)
