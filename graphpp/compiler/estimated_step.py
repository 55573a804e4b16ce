"""A step of a compiled graph, estimated: its costs, its simulated timeline, and its bytes over time. Nothing runs.

Contract: without measured costs the seconds are the sums of those of single operations, by their shapes
(`passes/graph/op_costs.py`) or as `parallel.op_costs` says. The bytes are those of the plan. Equal on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from graphpp._torch.symbols import considering
from graphpp.compiler.compile_graph import CompiledGraph, freed_windows, held_by_ranks, offload_windows, programs_of
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.stage_starts import pricing_of
from graphpp.planner.segments import estimated_costs
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.program import PipelineProgram
from graphpp.runtime.program_costs import costs_of_microbatches
from graphpp.schedules.simulate.bytes_over_time import KindCurve, bytes_over_time
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.state_bytes import sent_by_stage


def estimated_step(
    request: CompileRequest, graph: CompiledGraph, table: CheckedTable, measured: Costs | None = None
) -> tuple[Timeline, tuple[KindCurve, ...]]:
    """The timeline for a table of this graph, and bytes by kind over time for each rank, empty for an evaluation."""
    programs = programs_of(request, [graph] * table.running.microbatches, table)
    timeline = simulate(table.running, _costs(request, graph, programs[0], table) if measured is None else measured)
    if not table.training:
        return timeline, ()
    windows = freed_windows(request, offload_windows(request, [graph], programs, table))
    held = held_by_ranks(request, graph, programs, table)
    return timeline, bytes_over_time(timeline, costs_of_microbatches(programs, table.flow), held, windows)


def _costs(request: CompileRequest, graph: CompiledGraph, program: PipelineProgram, table: CheckedTable) -> Costs:
    pricing = pricing_of(request)
    with considering(graph.values):
        costs = estimated_costs(program, graph.sources, pricing)
    shards = request.place.shards
    if table.shards is None or shards is None or program.gathers_layers:
        return costs  # gathers of single layers are operations of the programs
    gathered, reduced = sent_by_stage(graph.state(request), len(program.stages), shards)
    gathers, reductions = (tuple(pricing.message(round(nbytes)) for nbytes in each) for each in (gathered, reduced))
    return replace(costs, gathers=gathers, reductions=reductions)
