"""`graphpp.compile` and `graphpp.verify`: read the options, find the place of this rank, agree with the other ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from graphpp.arguments import NUMBER, Accepted, or_none, positive_up_to, require
from graphpp.backends.choose_backend import compiler_of
from graphpp.batch.batch_dims import BatchDims
from graphpp.batch.microbatch import Microbatch, flatten_microbatch
from graphpp.capture.check_arguments import check_arguments, note_hooks
from graphpp.capture.loss import LossFunction
from graphpp.capture.tensor_parallel.check_meshes import check_meshes
from graphpp.cluster_planner.plans.as_options import with_plan
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import BatchError, GraphPPError
from graphpp.options.backend import BackendLike
from graphpp.options.debug import DebugLike
from graphpp.options.gradients import GradientsLike
from graphpp.options.memory import MemoryLike
from graphpp.options.microbatches import MicrobatchesLike
from graphpp.options.options import Options
from graphpp.options.parallel import ParallelLike
from graphpp.options.split import Split
from graphpp.ownership.ownership import sharded_elsewhere
from graphpp.parallel.agreement import Round
from graphpp.parallel.facts import Facts
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.parallel.place import (
    MeshLike,
    check_planned,
    check_planned_experts,
    pipeline_ranks,
    place_of,
    planned_mesh,
    shard_ranks,
    usable_device,
)
from graphpp.parallel.rank_place import RankPlace
from graphpp.pipeline.pipeline import Pipeline
from graphpp.runtime.dtensors import is_sharded, refuse_spread
from graphpp.runtime.model_state import tensor_lines
from graphpp.schedules.generate.read import ScheduleLike
from graphpp.verification.report import Verification
from graphpp.verification.subject import SimulatedPlace, cut_as_in_a_step, device_of, ranks_of, rotated
from graphpp.verification.verify import verified
from graphpp.verification.whole_batch import AGAINST, Against

_VERIFIED = positive_up_to(12)
_DIFFERENCE = Accepted(
    "a relative difference of 0 or more",
    lambda value: NUMBER.accepts(value) and 0 <= value < float("inf"),  # type: ignore[operator]
)


def compile(  # noqa: PLR0913 - the options of a pipeline, all of them optional
    model: nn.Module,
    loss: LossFunction | None = None,
    *,
    example: Microbatch | None = None,
    split: Split = None,
    schedule: ScheduleLike = "auto",
    microbatches: MicrobatchesLike = None,
    mesh: MeshLike = None,
    parallel: ParallelLike = None,
    backend: BackendLike = "eager",
    memory: MemoryLike = None,
    gradients: GradientsLike = None,
    debug: DebugLike = None,
    artifact: str | os.PathLike[str] | None = None,
    plan: TrainingPlan | None = None,
) -> Pipeline:
    """Compile `model` and `loss` into a pipeline-parallel training step. Every rank calls this with the same arguments.

    `docs/options.md` has each option with all its forms; `graphpp.Memory`, `Gradients`, `Parallel` and `Debug` group them.

    Args:
        model: any module that `torch.export` can trace. The model is not changed, and its forward never runs on data.
        loss: `loss(output, target)` -> scalar, or (scalar, dict of numbers to report). None: `output.loss` (Hugging Face).
        example: one microbatch, for its shapes. None: taken from the first step.
        split: where stages start: FQNs, a list of FQNs per stage, a number of stages, `graphpp.split_points(...)`, a
            `graphpp.Layout`. None: one stage per slot of the schedule, with equal numbers of layers. "auto": as None, but
            cut at the module calls that give the fastest simulated step.
        schedule: a name, a CSV file in torch's format, a `Schedule`, rows of action strings, a function (ranks, stages,
            microbatches) -> table. "auto": a plain loop in one process, 1F1B for one stage a rank, Interleaved1F1B for several.
        microbatches: a `graphpp.Microbatches` (count, batch_dims). A number: its `count` per batch. None: the largest divisor
            of the batch up to 4 per rank, and 1 in one process.
        mesh: a `DeviceMesh` with the dimensions `pp`, `dp_replicate` and `dp_shard` (data parallelism, with whole parameters
            and with shards of them), `cp` (context parallelism, with `graphpp.attention`), `tp` (tensor parallelism, of a
            model after `parallelize_module` over this dimension) and `ep` (expert parallelism, with `graphpp.experts`, or with
            experts that are `DTensor`s over this dimension), or the process group of this pipeline's ranks. Along all but `pp`
            and `tp`, gradients are averaged after each step, and losses stay each pipeline's own.
            With `dp_shard` the parameters become `DTensor`s once the model is captured: make the optimizer of
            `pipe.parameters()` then. None: the world, initialised from torchrun's variables if needed, else one process.
        parallel: a `graphpp.Parallel`, or the device of this rank.
        backend: "eager" (bit-equal to a plain loop), "inductor", a `graphpp.Inductor` or `graphpp.Eager` with options, or a
            function (fx.GraphModule, examples) -> callable, as `torch.compile(backend=)` takes it.
        memory: a `graphpp.Memory` (recompute, offload, cap). A fraction, "full", "selective": its `recompute`.
        gradients: a `graphpp.Gradients` (reduction, dtype, fused). "mean", "sum": its `reduction`.
        debug: a `graphpp.Debug` (dump, max_graphs). A path: its `dump`.
        artifact: a folder. The first start saves its captured graphs there, and a later start with an unchanged model loads
            them. `docs/cache.md` lists the changes that graphpp detects; the caller is responsible for all others.
        plan: a `graphpp.TrainingPlan` (`graphpp.plan(...).best`). It replaces `split`, `schedule`, `microbatches`, `mesh` (if
            none is given), `memory.recompute`, `memory.offload`, `memory.word_parts`, `memory.logits_tokens`, `parallel.keep`,
            `parallel.param_dtype` and `gradients.dtype`; an `example` has as many rows as a microbatch of the plan.

    Raises:
        CaptureError, SplitError, ScheduleError, BatchError, GraphPPError: a model, loss or option that cannot be compiled.
        MismatchError: ranks were given different arguments; every rank raises. All are `GraphPPError`; nothing is changed.
    """
    split, schedule, microbatches, parallel, memory, gradients = with_plan(
        plan, (split, schedule, microbatches, parallel, memory, gradients), example
    )
    ranks = Options(parallel=parallel).parallel
    if plan is not None and mesh is None:
        mesh = planned_mesh(model, plan.mesh, ranks.device, ranks.start_timeout)
    elif plan is not None:
        check_planned(mesh, plan.mesh)
        check_planned_experts(ranks.expert_mesh, plan.expert_mesh)
    place = place_of(
        model, mesh, ranks.device, ranks.start_timeout, shards_alone=ranks.mixed, expert_mesh=ranks.expert_mesh
    )

    with FailureBoard((place.everyone,), "compile", place.described).watching(), Round(place.agreement(place.everyone)) as r:
        check_arguments(model, loss, example)
        check_meshes(model, place.tp_group, place.experts_group, place.expert_dims)
        _check_unsharded(model)
        options = Options(split, schedule, microbatches, parallel, backend, memory, gradients, debug, artifact)
        options.memory.caps(place.ranks)
        BatchDims.of(model, options.microbatches.batch_dims)
        compiler_of(options.backend)
        _check_parallel(options, place)
        r.compare(_given(model, loss, example, place.device, options))
    if place.rank == 0:
        note_hooks(model)
    return Pipeline(model, loss, options, place, place.agreement(place.model_parallel), example)


def verify(  # noqa: PLR0913 - the options of `compile`, and two of its own
    model: nn.Module,
    loss: LossFunction | None = None,
    example: Microbatch | Sequence[Microbatch] | None = None,
    *,
    split: Split = None,
    schedule: ScheduleLike = "auto",
    microbatches: MicrobatchesLike = None,
    mesh: MeshLike = None,
    parallel: ParallelLike = None,
    backend: BackendLike = "eager",
    memory: MemoryLike = None,
    gradients: GradientsLike = None,
    debug: DebugLike = None,
    artifact: str | os.PathLike[str] | None = None,
    plan: TrainingPlan | None = None,
    ranks: int | None = None,
    tolerance: float | None = None,
    against: Against = "microbatches",
) -> Verification:
    """Run one step as stage programs, as the uncut joint graph and in plain eager, and report the first difference.

    Runs in this process, on the model's device, and does not change the model. Needs memory for three sets of gradients, and
    for all values of a step if it has to locate a difference.

    Args:
        model, loss, split, schedule, parallel, backend, memory, gradients, debug: as for `graphpp.compile`. Offloading and
            CUDA graphs change no value, and the check runs without them.
        artifact: a folder from `graphpp.compile(artifact=)`, whose graph is verified. `GraphPPError` if it has no fitting one.
        example: one microbatch with data (the others are made by rotating its rows), or a list of all microbatches. With
            `against="whole batch"` a whole batch, which is cut as `Pipeline.step` cuts it.
        microbatches: None: as many as the table or list has, else one per rank, at least 2; for a whole batch as `step` does.
        mesh: as for `graphpp.compile`; only the sizes of its dimensions `pp` and, for `memory.cap`, `dp_shard` count.
        plan: as for `graphpp.compile`. Its `keep` and `param_dtype` are left out: they say how shards are gathered, and there
            are none. Its microbatches may have any number of rows here.
        ranks: the schedule's number of ranks. None: that of the plan, the mesh, the table or the split, else 2.
        tolerance: the relative difference that counts as rounding. None: 1e-6 in float32, and as many units in the last
            place of the coarsest floating dtype that the model computes in (bfloat16: 0.066). Values that a backend compiles,
            or that a trace computes by other operators than eager, may then differ by ten times the measured rounding of
            this step, and those of a whole batch of n elements by ten or sqrt(n) times, the larger of both.
        against: "microbatches": the step is compared with eager microbatch by microbatch. "whole batch": eager over the
            microbatches is compared with eager over the whole batch as well (`Verification.whole_batch`). They differ where
            the model or the loss does not separate over microbatches, as batch norm and contrastive losses do not.

    Raises:
        GraphPPError: those of `graphpp.compile`, and one for a model without memory. A difference does not raise: see
            `Verification.ok`, `Verification.raise_if_wrong()`, or print the result.
    """
    require(GraphPPError, "against", AGAINST, against)
    several = list(example) if isinstance(example, Sequence) else [] if example is None else [example]
    if not several:
        raise BatchError("verify needs example=: a graphpp.Microbatch with data, or a list of them")
    if against == "whole batch" and len(several) > 1:
        raise BatchError('against="whole batch" cuts the batch itself: give example= the whole batch, not its microbatches')
    if isinstance(model, nn.Module):
        refuse_spread(model, "graphpp.verify runs in one process: give it the model before parallelize_module")
    for each in several:
        check_arguments(model, loss, each)
        absent = [path for path, tensor in flatten_microbatch(each).tensors.items() if tensor.is_meta]
        if absent:
            raise BatchError(f"verify computes with the data of example=, and {absent[0]} has none: it is on the meta device")
    split, schedule, microbatches, parallel, memory, gradients = with_plan(
        plan, (split, schedule, microbatches, parallel, memory, gradients), sharded=False
    )
    planned, shards = (pipeline_ranks(mesh), shard_ranks(mesh)) if plan is None else _planned_ranks(plan, mesh, ranks)
    options = Options(split, schedule, microbatches, parallel, backend, memory, gradients, debug, artifact)
    if options.parallel.mixed:
        raise GraphPPError(
            "parallel.param_dtype and parallel.reduce_dtype: verify compares with eager, which has no shards: leave "
            "them out, and give a copy of the model with its parameters in the dtype in which they are to compute"
        )
    if options.parallel.keep == 0 and shards is not None:
        raise GraphPPError(
            "parallel.keep=0: verify runs all ranks in one process, where there is nothing to gather: leave it out, for the "
            "programs compute the same without it"
        )
    compiler_of(options.backend)
    count = ranks_of(ranks if ranks is not None else planned, options)
    options.memory.caps(count)
    if len(several) > 1 and options.microbatches.count not in (None, len(several)):
        given = options.microbatches.count
        raise BatchError(f"example= has {len(several)} microbatches, microbatches={given}: leave one out")
    require(GraphPPError, "tolerance", or_none(_DIFFERENCE), tolerance)
    wanted = options.microbatches.count or max(2, count)
    require(BatchError, "microbatches", _VERIFIED, wanted)
    dims, flat = BatchDims.of(model, options.microbatches.batch_dims), [flatten_microbatch(each) for each in several]
    device = usable_device(options.parallel.device or device_of(model))
    place = SimulatedPlace(device, None, count=count, shard_count=shards)
    dumps = debug is not None
    if against == "whole batch":
        parts = cut_as_in_a_step(flat[0], count, options, dims)
        return verified(model, loss, options, place, parts, tolerance, dumps, dims.with_rows(flat[0]))
    parts = [dims.with_rows(each) for each in flat] if len(flat) > 1 else rotated(flat[0], wanted, dims)
    return verified(model, loss, options, place, parts, tolerance, dumps)


def _planned_ranks(plan: TrainingPlan, mesh: MeshLike, ranks: object) -> tuple[int, int | None]:
    """The ranks of a pipeline and of a parameter's shards. Raises `GraphPPError` if a mesh or ranks were given that differ."""
    shape = plan.setting.shape
    if mesh is not None:
        check_planned(mesh, plan.mesh)
    if ranks not in (None, shape.pp):
        raise GraphPPError(f"ranks: plan= is for {shape.pp}, got {ranks}: leave one of the two out")
    return shape.pp, shape.shards if shape.shards > 1 else None


def _check_parallel(options: Options, place: RankPlace) -> None:
    """Raise `GraphPPError` for options that do not fit the mesh, or each other."""
    ranks = options.parallel
    if ranks.mixed and place.sharding is None:
        raise GraphPPError(
            "parallel.param_dtype and parallel.reduce_dtype: they say how shards are gathered and gradients are sent along "
            "dp_shard: give a mesh= with this dimension, of one rank where nothing is to be cut"
        )
    if ranks.keep is not None and "dp_shard" not in (() if place.mesh is None else place.mesh.mesh_dim_names or ()):
        raise GraphPPError(
            f"parallel.keep={ranks.keep}: the option says how many stages are gathered along dp_shard at once: give a mesh= "
            "with this dimension, or leave the option out"
        )
    if options.memory.word_parts is not None and place.sharding is not None and place.ranks == 1:
        raise GraphPPError(
            "memory.word_parts: with dp_shard the parts are those of the ranks of a pipeline, which has one rank: leave it out"
        )
    if ranks.keep == 0 and place.sharding is not None and options.gradients.fused:
        raise GraphPPError(
            "gradients.fused=True multiplies into sums of whole gradients, and with parallel.keep=0 there are none: each "
            "microbatch's gradients leave at once. Leave one of the two out"
        )
    if place.experts is not None and ranks.replica_values == "broadcast":
        raise GraphPPError(
            'parallel.replica_values="broadcast": other experts would get the first replica\'s values where they are '
            "plain parameters: leave the option out on a mesh with ep, and seed all ranks alike"
        )


def _check_unsharded(model: nn.Module) -> None:
    """Raise `GraphPPError` if another pipeline has sharded a parameter of the model."""
    fqn = next((fqn for fqn, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if fqn is not None:
        raise sharded_elsewhere(fqn)


def _given(
    model: nn.Module, loss: LossFunction | None, example: Microbatch | None, device: torch.device, options: Options
) -> Facts:
    """The arguments that must be equal on all ranks."""
    return Facts(
        {
            "the torch version": [torch.__version__],
            "the type of the device": [device.type],
            "the model": tensor_lines(model),
            "loss=": ["none" if loss is None else "given"],
            "example=": ["none" if example is None else "given"],
            **{f"{path}=": lines for path, lines in options.facts()},
        }
    )
