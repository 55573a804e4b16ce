"""Bytes of parameters, gradients, optimizer state and buffers, by stage and by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from graphpp._torch.symbols import hint
from graphpp.compiler.request import CompileRequest
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.memory_plan import StateDtypes, state_of
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.dtensors import is_expert
from graphpp.runtime.fsdp.precision import Precision
from graphpp.runtime.program import Output, StageProgram
from graphpp.schedules.table.state_bytes import HeldBytes, Layers, StateBytes, held_bytes


def state_bytes(request: CompileRequest, joint: JointGraph, stages: Sequence[StageProgram]) -> tuple[StateBytes, ...]:
    """The bytes by the stages that read them."""
    options, parameters = request.options, dict(request.model.named_parameters())
    precision = Precision(options.parallel.param_dtype, options.parallel.reduce_dtype)
    dtypes = StateDtypes({fqn: each.dtype for fqn, each in parameters.items()}, options.gradients.dtype, precision)
    experts, ranks_of = request.place.experts, dict[str, dict[str, int]]()
    if experts is not None:
        averaged_over = 1 if experts.replicas is None else dist.get_world_size(experts.replicas)
        own = {"averaged_over": averaged_over} if experts.sharding is None else {"shards": experts.sharding.ranks}
        ranks_of = {fqn: own for fqn, each in parameters.items() if is_expert(each, request.place)}
    return state_of(joint, stages, dtypes, options.memory, ranks_of)


def kept_outputs(joint: JointGraph, stages: Sequence[StageProgram], microbatches: int) -> StateBytes:
    """The model's outputs of a step, which the last stage keeps under `memory.outputs` until the step ends."""
    outputs = (node.meta["val"] for role, node in joint.outputs() if isinstance(role, Output))
    return StateBytes((len(stages) - 1,), buffers=microbatches * sum(hint(each.numel()) * each.itemsize for each in outputs))


def held_by_rank(
    request: CompileRequest, state: Sequence[StateBytes], table: CheckedTable, layers: Layers | None = None
) -> tuple[HeldBytes, ...]:
    """The bytes on each rank in a step. `layers`: bytes of programs that gather single layers."""
    home, ranks = table.running.rank_of_stage, table.running.ranks
    shards = request.place.shards if table.shards is not None else None
    frees, in_order = request.options.parallel.keep is not None, not request.options.fused or layers is not None
    copies = request.place.replicas if request.place.sharding is None else request.place.sharding.copies
    over = 1 if copies is None or request.options.parallel.sum_order == "any" else dist.get_world_size(copies)
    return held_bytes(state, home, ranks, shards, frees, layers, in_order=in_order, averaged_over=over)
