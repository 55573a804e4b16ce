"""Where the stages of a captured graph start: the position of each stage's first operation (`planner/resolve_split.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpp._torch import aot
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.compiler.held_state import held_by_rank, state_bytes
from graphpp.compiler.program_variants import choices_of, variant_of
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.time_programs import Stopwatch
from graphpp.compiler.word_stages import PartCalls
from graphpp.options.split import ModuleCall
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.planner.auto_split import CutSearch
from graphpp.planner.microbatch_count import stages_of
from graphpp.planner.resolve_split import equal_layers, resolve
from graphpp.planner.segments import Pricing, places, seconds_by_operations, segments_of
from graphpp.planner.tables import CheckedTable
from graphpp.progress import working
from graphpp.runtime.program import StageProgram
from graphpp.schedules.table.state_bytes import HeldBytes, StateBytes


def resolved_starts(request: CompileRequest, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The stage starts that the option `split` asks for."""
    options, known = request.options, [name for name, _ in request.model.named_modules()]
    stages = None if options.split is not None else stages_of(options, request.place.ranks)
    if options.memory.word_parts is None or isinstance(options.split, Sequence):
        return resolve(options.split, calls, stages, known)
    total = options.split if isinstance(options.split, int) else stages
    assert total is not None, "the order of the parts was found"
    return PartCalls.among(calls).starts(total, lambda body: resolve(body, calls, None, known))


def fastest_starts(
    request: CompileRequest, joint: JointGraph, calls: Sequence[ModuleCall], table: CheckedTable
) -> tuple[int, ...]:
    """The starts, among module calls, that are fastest in the simulation of a table."""
    options, place = request.options, request.place
    # The simulation counts gathers of layers separately.
    choices = replace(choices_of(request, joint, variant_of(request, table)), layers=None)

    def state(stages: Sequence[StageProgram]) -> tuple[StateBytes, ...]:
        return state_bytes(request, joint, stages)

    def held(state: Sequence[StateBytes]) -> tuple[HeldBytes, ...]:
        return held_by_rank(request, state, table)

    with working("searching where stages start"), aot.quick():
        segments = segments_of(joint, places(joint, calls), choices, timed_pricing(request), state)
        hidden = 0.0 if options.parallel.keep == 0 else segments.costs.hidden  # computations that gather are not woven
        segments = replace(segments, costs=replace(segments.costs, flow=table.flow, hidden=hidden))
        parts = PartCalls.among(calls)
        parts.check(table.running.stages)
        search = CutSearch(segments, table.running, held, options.memory.caps(place.ranks), parts.fixed_starts)
        return search.starts(lambda: parts.starts(table.running.stages, lambda body: equal_layers(body, calls)))


def pricing_of(request: CompileRequest) -> Pricing:
    """Seconds of programs on this device, estimated from shapes or given by `parallel.op_costs`."""
    device = OpCosts.of(request.place.device.type)
    seconds = request.options.parallel.node_seconds() or device
    return Pricing(seconds_by_operations(seconds), device.message, seconds)


def timed_pricing(request: CompileRequest) -> Pricing:
    """Seconds of programs, timed by all ranks together or given by `parallel.op_costs`."""
    pricing, place = pricing_of(request), request.place
    if request.options.parallel.node_seconds() is not None:
        return pricing
    ranks, cache = place.agreement(place.everyone), DiskCache(default_folder())
    return replace(pricing, programs=Stopwatch(place.device, ranks, cache, pricing.programs))


def same_starts(boundaries: Sequence[Sequence[str]], calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The positions of the first graph's boundaries in this graph.

    A call may have no operation here (dropout in evaluation): the stage then starts before the next call that has one.
    """
    positions = {call.fqn: call.position for call in calls}
    end = max((call.end for call in calls), default=0)
    return (0, *(next((positions[fqn] for fqn in names if fqn in positions), end) for names in boundaries))
