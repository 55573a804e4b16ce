"""The variants of stage programs that tables run, the passes of each variant, and programs for one set of sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graphpp._torch.symbols import Values
from graphpp.backends.choose_backend import workspace_of
from graphpp.capture import activation_checkpoints as checkpoints
from graphpp.compiler.request import CompileRequest
from graphpp.options.recompute import Recompute
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.lower import LoweringOptions
from graphpp.passes.stage.gather_layers import RankGroup, ShardedLayers
from graphpp.planner import recompute_policy as policy
from graphpp.planner.layers import layer_or_call, module_calls
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.dtensors import is_expert
from graphpp.runtime.fsdp.precision import Precision
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.program import Boundary, PipelineProgram, StageProgram, TensorMeta


@dataclass(frozen=True)
class ProgramVariant:
    """A variant of the stage programs of a joint graph.

    `split_backward`: the backward also exists as input gradient (I) and weight gradient (W). `recomputed`: the backward
    recomputes the values that the option `recompute` names; with `ahead` a program of its own (R) recomputes them.
    """

    split_backward: bool
    recomputed: bool
    ahead: bool = False


def variant_of(request: CompileRequest, table: CheckedTable) -> ProgramVariant:
    """The variant that a table uses first."""
    recomputed = table.recomputed_stages(request.options.memory.recompute is not None)
    return ProgramVariant(table.splits_backward, any(recomputed), bool(table.plain.recomputed_ahead))


def choices_of(request: CompileRequest, joint: JointGraph, variant: ProgramVariant) -> LoweringOptions:
    """The passes of a variant, and their settings."""
    options, place = request.options, request.place
    recompute = options.memory.recompute or Recompute()
    region = policy.region_of(recompute, module_calls(joint)) if variant.recomputed and joint.training else None
    savings = policy.recompute_budget(recompute, region, place.device.type, options.parallel.node_seconds())
    whole = region if recompute.fraction is None else None  # a budget chooses single values
    whole, chosen = checkpoints.add_checkpoint_regions(joint, whole, policy.may_recompute(recompute))
    rerun, layers = policy.may_repeat_in_weight_grad(recompute), _sharded_layers(request, joint)
    fused = options.fused and layers is None  # gradients are reduced at once: there is no sum to fuse with
    shared_by = None if place.tp_group is None else place.name_along("tp")
    workspace = workspace_of(options.backend)
    # A CUDA graph reads a hoisted value in place, and gathered parameters may have another address each time.
    hoists = not (options.backend.cudagraphs and place.sharding is not None) and (options.hoists_all or layers is None)
    how = fused, hoists, layers, shared_by, workspace, options.hoists_all, variant.ahead
    return LoweringOptions(variant.split_backward, rerun, whole, chosen, savings, *how)


def _sharded_layers(request: CompileRequest, joint: JointGraph) -> ShardedLayers | None:
    """How programs gather single layers; None if they take whole parameters."""
    sharding, parallel = request.place.sharding, request.options.parallel
    if sharding is None or parallel.keep != 0:
        return None
    own = dict(request.model.named_parameters(remove_duplicate=False))
    dtypes = {name: own[whole_name(name)].dtype for name in joint.parameters}
    precision = Precision(parallel.param_dtype, parallel.reduce_dtype)
    layer_of = layer_or_call(module_calls(joint))
    experts, others = request.place.experts, dict[str, RankGroup]()
    if experts is not None and experts.sharding is not None:
        group = RankGroup(experts.sharding.group.group_name, experts.sharding.ranks)
        others = {fqn: group for fqn, each in own.items() if is_expert(each, request.place)}
    return ShardedLayers(sharding.group.group_name, sharding.ranks, dtypes, precision.of_messages, layer_of, others)


def sized_program(program: PipelineProgram, values: Values) -> PipelineProgram:
    """Specialise programs with symbolic sizes to one microbatch's sizes.

    The compiled code is shared by all sizes; only boundaries, saved values, bytes and `sizes` change.
    """
    return replace(
        program,
        stages=tuple(_stage(stage, values) for stage in program.stages),
        boundaries=tuple(
            Boundary(each.stage, _metas(each.forward, values), _metas(each.backward, values)) for each in program.boundaries
        ),
        sizes={formula: values(number) for formula, number in program.sizes.items()},
        values=values,
    )


def _stage(stage: StageProgram, values: Values) -> StageProgram:
    return replace(
        stage,
        programs={phase: replace(item, values=values) for phase, item in stage.programs.items()},
        saved=_metas(stage.saved, values),
        saved_memory=_metas(stage.saved_memory, values),
        kept_memory=_metas(stage.kept_memory, values),
        unread_memory=_metas(stage.unread_memory, values),
        recomputed_memory=_metas(stage.recomputed_memory, values),
        waiting_memory=_metas(stage.waiting_memory, values),
    )


def _metas(metas: Iterable[TensorMeta], values: Values) -> tuple[TensorMeta, ...]:
    return tuple(meta.at(values) for meta in metas)
