"""`graphpp.compile`: from an unmodified model and a loss to a pipeline, with everything that can be checked checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from graphpp.backends import inductor as backends
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.check_arguments import (
    check_given,
    check_settings,
    checked_cap,
    checked_flag,
    number_of_microbatches,
)
from graphpp.capture.trace import LossFunction
from graphpp.compiler import facts
from graphpp.compiler.build import Settings
from graphpp.options import recompute as recomputing
from graphpp.options.gradients import Reduction
from graphpp.options.split import Split
from graphpp.parallel.agreement import Agreement, Facts
from graphpp.parallel.failure import FailureBoard
from graphpp.parallel.place import checked_replicas, place_of
from graphpp.passes.graph.op_costs import Cost
from graphpp.pipeline.pipeline import Pipeline
from graphpp.planner import offload_policy as offloading
from graphpp.runtime.model_state import tensor_lines
from graphpp.schedules.generate.read import Source, read


def compile(  # noqa: PLR0913 - what a user may choose, all of it optional
    model: nn.Module,
    loss: LossFunction | None = None,
    *,
    example: Microbatch | None = None,
    split: Split = None,
    schedule: Source = "auto",
    microbatches: int | None = None,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    loss_reduction: Reduction = "mean",
    accumulate_dtype: torch.dtype | None = None,
    backend: backends.Given = "eager",
    fused_accumulation: bool | None = None,
    recompute: recomputing.Given = None,
    memory_cap: int | Sequence[int] | None = None,
    offload: offloading.Given = None,
    cudagraphs: bool = False,
    op_costs: Cost | None = None,
    max_graphs: int = 16,
    dump: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Compile `model` and `loss` into a pipeline-parallel training step. Called by every rank with the same arguments.

    Args:
        model: any module that `torch.export` can trace; it is not changed, and its forward never runs on data.
        loss: `loss(output, target)` -> scalar, or (scalar, dict of numbers to report); None: the output's own `.loss`, as
            Hugging Face models return.
        example: one microbatch, for its shapes; None: taken from the first step.
        split: where stages start: FQNs, one list of FQNs per stage, a number of stages, `graphpp.split_points(...)`,
            a `graphpp.Layout`; None: one stage per slot of the schedule, equal numbers of layers.
        schedule: a name (`graphpp.schedules.SCHEDULES` has them), a CSV file in torch's format, a `Schedule`, rows of
            action strings, or a function (ranks, stages, microbatches) -> table. "auto": a plain loop in one process, 1F1B
            for one stage a rank, Interleaved1F1B for several.
        microbatches: into how many parts `step` cuts a batch; None: the largest divisor of the batch up to 4 a rank.
        group: the ranks of this pipeline; None: the world, initialised from torchrun's variables if nobody has;
            without those: one process.
        replicas: the ranks that hold this rank's stages in other pipelines and train on other data (data parallelism):
            after each step their gradients are averaged, under every schedule; losses stay each pipeline's own.
        device: where this rank runs; None: the model's own CUDA device, else CUDA by LOCAL_RANK where every local
            rank has a GPU, else the CPU.
        loss_reduction: "mean" or "sum" of the loss over microbatches; gradients follow.
        accumulate_dtype: in what gradients of narrower parameters add up over the microbatches of a step, e.g.
            torch.float32 for parameters in bfloat16; `param.grad` is rounded to its own dtype once, at the end. None: as
            autograd adds, in the gradient's dtype.
        backend: who runs a stage's operations: "eager" (torch's operators one by one, bit-equal to a plain loop); "inductor",
            or a `graphpp.Inductor` with options (equal layers are compiled once, and kept in a cache folder for other ranks and
            later runs; same numbers but for rounding); a function (fx.GraphModule, fake tensors) -> callable, as
            torch.compile takes. What cannot be compiled runs eagerly, with a warning.
        fused_accumulation: True: gradients of weights are added up by the multiplication that makes them, and others as soon
            as they are made: no gradient is kept per microbatch, and no pass over it. Not bit-equal to a plain loop: the
            sums are rounded otherwise, which in float32 changes a gradient by about 1e-6 of its largest element (1e-2 in
            bfloat16, where sums of many microbatches should be wider: `accumulate_dtype`). False: bit-equal. None: True under
            every backend but "eager".
        recompute: what is computed again for the backward, not saved. None: only what costs next to nothing (views, casts,
            pointwise operations, norms, look-ups of what is saved anyway). A number above 0 and up to 1: as much more, at the
            least cost in time, as brings every stage to that fraction of the bytes it saves under None, or as close as it can
            come. "selective": in the layers all but matrix products, convolutions, attention and collectives. "full": every
            layer. FQNs of modules, a function of a graph's node, or a `graphpp.Recompute`. Bit-equal, dropout included. A
            schedule whose `recomputed` is set says for which stages and microbatches; the free savings hold for all.
        memory_cap: bytes of activations that may be alive on a rank in a step, one number or one per rank; a schedule that
            would need more is refused before the first step. Counted from the graph: what waits for its backward, and what a
            program has alive while it runs. Parameters, gradients and an operator's own workspace come on top.
        offload: what of the saved values waits for its backward in the host's pinned memory: a fraction of the bytes that a
            stage saves for a microbatch (the largest values first), True (all that is worth it), a function of a value's
            `TensorMeta` that says which, or a `graphpp.Offload`; None: nothing. Values whose backward comes soon stay. The
            plan shows what leaves; `memory_cap` does not count it while it is away. Same bits. On the CPU nothing moves.
        cudagraphs: whether stage programs are recorded as CUDA graphs, in the third microbatch that they run, and replayed
            from then on. Programs with collectives, random numbers or operations for which the host waits run without;
            `Pipeline.cudagraphs` says for each why, and the log once. Saved values are copied out of and into graphs.
        op_costs: what the operations of a graph take, in seconds, by which the parts of OVERLAP_F_B are woven: a function of
            a graph's node, the same on all ranks of the model's process groups; None: `graphpp.passes.graph.op_costs.OpCosts`.
        max_graphs: how many captured graphs are kept, one per shape of microbatch and mode; the least recently used goes.
        dump: folder for dumps of graphs, plan and schedule; None: the variable GRAPHPP_DUMP, if set.

    Raises:
        CaptureError, SplitError, ScheduleError: what cannot be compiled, and why; `MismatchError` on every rank where
            the ranks were given different things. All are `GraphPPError`. Nothing was changed then.
    """
    place = place_of(model, group, device)
    agreement = Agreement(place.group, place.device)

    def settings() -> Settings:
        check_given(model, loss, example, loss_reduction)
        check_settings(accumulate_dtype, max_graphs, fused_accumulation, op_costs)
        table = read(schedule)
        count = number_of_microbatches(microbatches, table)
        usual = Settings(place, example, split, table, count, loss_reduction, accumulate_dtype, max_graphs)
        chosen, several = recomputing.chosen(recompute), checked_replicas(replicas)
        cap = checked_cap(memory_cap, place.ranks)
        usual = replace(usual, fused_accumulation=fused_accumulation, offload=offloading.chosen(offload))
        return replace(
            usual,
            recompute=chosen,
            op_costs=op_costs,
            backend=backends.chosen(backend),
            replicas=several,
            memory_cap=cap,
            cudagraphs=checked_flag("cudagraphs", cudagraphs),
            dump=_folder(dump),
        )

    with FailureBoard(place.group, "compile").watching():
        agreed = agreement.together(settings, lambda made: _facts(model, loss, made))
    return Pipeline(model, loss, agreed, agreement)


def _folder(dump: str | os.PathLike[str] | None) -> Path | None:
    folder = dump if dump is not None else os.environ.get("GRAPHPP_DUMP")
    return Path(folder) if folder else None


def _facts(model: nn.Module, loss: LossFunction | None, settings: Settings) -> Facts:
    """What all ranks must have been given alike."""
    return Facts(
        {
            "the torch version": [torch.__version__],
            "the type of the device": [settings.place.device.type],
            "the model": tensor_lines(model),
            "loss=": ["none" if loss is None else "given"],
            "example=": ["none" if settings.example is None else "given"],
            "split=": [facts.spell_split(settings.split)],
            "schedule=": facts.spell_schedule(settings.schedule),
            "microbatches=": [str(settings.microbatches)],
            "loss_reduction=": [settings.loss_reduction],
            "accumulate_dtype=": [str(settings.accumulate_dtype)],
            "fused_accumulation=": [str(settings.fused)],
            "replicas=": ["none" if settings.replicas is None else f"{dist.get_world_size(settings.replicas)} ranks"],
            "memory_cap=": [str(settings.memory_cap)],
            "op_costs=": ["None" if settings.op_costs is None else "given"],
            "backend=": [backends.spelled(settings.backend)],
            "offload=": [offloading.spelled(settings.offload)],
            "cudagraphs=": [str(settings.cudagraphs)],
            "recompute=": [recomputing.spelled(settings.recompute)],
            "max_graphs=": [str(settings.max_graphs)],
        }
    )
