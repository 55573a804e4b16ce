"""`graphpp.stage_costs`: time the stages of a pipeline in one process, each distinct stage alone, before a pipeline exists.

Contract
    in   what `graphpp.compile` takes, one microbatch, the number of ranks
    out  `Costs` for `graphpp.simulate`, `schedule_auto` and `plan_auto`: seconds of F, I, W and B, bytes saved and alive
    No process group is needed. The model's forward does not run on data, and the model stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from graphpp.backends.compilers import RegionCompiler, compiler_of
from graphpp.batch.microbatch import Microbatch, flatten_microbatch
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.capture.check_arguments import check_arguments
from graphpp.capture.loss import LossFunction
from graphpp.compiler.capture_once import capture_graph
from graphpp.compiler.compile_graph import CompiledGraph, compile_graph
from graphpp.compiler.compile_regions import RegionCache
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.stage_starts import pricing_of
from graphpp.compiler.time_programs import Stopwatch
from graphpp.errors import BatchError, GraphPPError
from graphpp.options.backend import BackendLike
from graphpp.options.memory import MemoryLike
from graphpp.options.options import Options
from graphpp.options.parallel import ParallelLike
from graphpp.options.split import Split
from graphpp.parallel.place import usable_device
from graphpp.planner.segments import estimated_costs
from graphpp.planner.tables import CheckedTable, Tables
from graphpp.runtime.dtensors import refuse_spread
from graphpp.runtime.model_state import state_restored
from graphpp.runtime.program import PipelineProgram
from graphpp.schedules.generate.read import ScheduleLike
from graphpp.schedules.rewrite.merge_backward import without_overlaps
from graphpp.schedules.rewrite.split_backward import split_backward
from graphpp.schedules.table.costs import Costs
from graphpp.verification.subject import SimulatedPlace, device_of, ranks_of


def stage_costs(  # noqa: PLR0913 - a model, its loss, and those options of a pipeline that change a stage
    model: nn.Module,
    loss: LossFunction | None = None,
    example: Microbatch | None = None,
    *,
    split: Split = None,
    schedule: ScheduleLike = "auto",
    ranks: int | None = None,
    backend: BackendLike = "eager",
    memory: MemoryLike = None,
    parallel: ParallelLike = None,
) -> Costs:
    """Time every stage of a pipeline in this process, without a pipeline: each distinct stage alone, on this device.

    Stages that run the same operations are timed once: of 16 stages the first, one of the middle, and the last. The device
    must have memory for one stage at a time; the model itself may be on the meta device, with `parallel="cuda"` or "cpu".

    Args:
        model, loss, split, schedule, backend, memory, parallel: as for `graphpp.compile`. The schedule decides how many stages
            there are where `split` leaves it open; all kinds of actions are timed, those too that the schedule does not run.
        example: one microbatch, for its shapes.
        ranks: how many ranks the schedule is for. None: as many as the split or the table asks for, else 2.

    Returns:
        Seconds of F, I, W and B, and bytes, of each stage for one microbatch. Seconds of messages are estimated for the device:
        on a CPU loopback, on a GPU NVLink; `dataclasses.replace(costs, sends_forward=.., sends_backward=..)` gives others.

    Raises:
        The errors of `graphpp.compile`, and `GraphPPError` for a model on the meta device without a device to time it on.
    """
    if example is None:
        raise BatchError("stage_costs needs example=: a graphpp.Microbatch with the shapes of one microbatch")
    check_arguments(model, loss, example)
    refuse_spread(model, "graphpp.stage_costs runs in one process: give it the model before parallelize_module")
    options = Options(split, schedule, None, parallel, backend, memory, None, None)
    place = SimulatedPlace(_device(model, options), None, count=ranks_of(ranks, options))
    request = CompileRequest(model, loss, options, place, dumps=False)
    tables = Tables(options.schedule, place.ranks)

    def split_table(stages: int) -> CheckedTable:
        """The schedule with its backwards split, whose stages have programs for F, B, I and W."""
        found = tables.checked(stages, _microbatches(options, place.ranks), True)
        return replace(found, plain=split_backward(without_overlaps(found.plain)))

    with state_restored(model, place.device):
        graph = compile_graph(request, capture_graph(request, flatten_microbatch(example), True), split_table, None)
        compiler = compiler_of(request.options.backend)
        program = graph.program if compiler is None else _compiled(compiler, graph)
        pricing = pricing_of(request)
        cache = DiskCache(default_folder()) if compiler is None else None
        kernel = None if compiler is None else compiler.products
        stopwatch = Stopwatch(place.device, place.agreement(None), cache, pricing.programs, kernel)
        return estimated_costs(program, graph.sources, replace(pricing, programs=stopwatch))


def _device(model: nn.Module, options: Options) -> torch.device:
    found = options.parallel.device or device_of(model)
    if found.type == "meta":
        raise GraphPPError('the model is on the meta device, where nothing can be timed: give parallel="cuda" or "cpu"')
    return usable_device(found)


def _microbatches(options: Options, ranks: int) -> int:
    """As many microbatches as a table that was given has, else enough for every schedule."""
    return getattr(options.schedule, "microbatches", None) or 2 * ranks


def _compiled(compiler: RegionCompiler, graph: CompiledGraph) -> PipelineProgram:
    """The programs of all stages as the backend runs them."""
    regions = RegionCache(compiler, 0)
    (program,), calls = regions.outlined([graph], [graph.program], range(len(graph.program.stages)))
    regions.compile(calls)
    return program
