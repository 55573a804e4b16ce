"""The page of a pipeline: plan, simulated step, measured step, memory, boundaries, run.

Contract
    in   the request, the pipeline's first graph, its tables, a profile or none, the run so far
    out  a `Page`. Without a profile the times of the step are estimated, and the page says so
    Raises `GraphPPError` for a profile of another pipeline. Nothing runs, and every rank gets the same page but for the losses.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.compiler.estimated_step import EstimatedStep, estimated_step
from graphpp.compiler.request import CompileRequest
from graphpp.errors import GraphPPError
from graphpp.pipeline.page.boundary_views import boundary_views
from graphpp.pipeline.profile import Profile
from graphpp.planner.tables import CheckedTable, Tables
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import Page
from graphpp.report.run_view import RunView
from graphpp.report.timeline_view import TimelineView
from graphpp.units import spell_bytes, spell_time

_ESTIMATED = (
    "Nothing was profiled: the seconds are estimated from the shapes of the operations, for a usual device of this type. They "
    "rank schedules, and say little about hours. Give profile=pipe.profile(batch, target=..) for measured ones."
)
_BY_CALLER = "Nothing was profiled: the seconds of operations are those of parallel.op_costs, messages are estimated."
_MEASURED = "Simulated with the medians that pipe.profile measured."
_BYTES = (
    "The bytes follow from the graph and the schedule. The workspace inside an operator, messages between stages, and memory "
    "that the allocator does not give back are not counted."
)


def page_of(request: CompileRequest, graph: CompiledGraph, tables: Tables, profile: Profile | None, run: RunView) -> Page:
    """The page."""
    table = _table_of(graph, tables, profile)
    step = estimated_step(request, graph, table, None if profile is None else profile.costs)
    own = request.options.parallel.op_costs is not None
    note = _MEASURED if profile is not None else _BY_CALLER if own else _ESTIMATED
    measured = [] if profile is None else [profile.timeline]
    boundaries, relays = boundary_views(graph)
    caps = request.options.memory.caps(request.place.ranks)
    return Page(
        title=f"{type(request.model).__name__}: {table.plain.name} on {_count(table.running.ranks, 'rank')}",
        facts=tuple(_facts(request, graph, step, table, profile)),
        timelines=(TimelineView.of(step.timeline, note), *map(TimelineView.of, measured)),
        memory=MemoryView.of(step.memory, caps, note=_BYTES) if step.memory else None,
        stages=tuple(each.view for each in graph.plan.stages),
        boundaries=boundaries,
        relays=relays,
        run=run,
    )


def _table_of(graph: CompiledGraph, tables: Tables, profile: Profile | None) -> CheckedTable:
    """The table of the profiled step, or that of the plan."""
    planned = graph.plan.schedule
    if profile is None:
        return tables.checked(planned.stages, planned.microbatches, graph.captured.joint.training)
    own = profile.timeline.schedule
    found = tables.checked(planned.stages, own.microbatches, True) if own.stages == planned.stages else None
    if found is None or found.running.table != own.table:
        raise GraphPPError(
            f"profile: it is of a step of {own.name!r} with {own.stages} stages on {own.ranks} ranks and {own.microbatches} "
            "microbatches, which this pipeline does not run: take profile=pipe.profile(...) of this pipeline"
        )
    return found


def _facts(
    request: CompileRequest, graph: CompiledGraph, step: EstimatedStep, table: CheckedTable, profile: Profile | None
) -> Iterator[tuple[str, str]]:
    running, stages = table.running, graph.plan.stages
    yield "schedule", table.plain.name
    yield "stages", str(running.stages)
    yield "ranks", str(running.ranks)
    yield "microbatches", str(running.microbatches)
    yield "device", request.place.device.type
    yield f"step, {'estimated' if profile is None else 'simulated'}", spell_time(step.timeline.makespan, "s")
    if profile is not None:
        yield "step, measured", spell_time(profile.timeline.makespan, "s")
    yield "parameters", f"{sum(each.parameters for each in stages):,}"
    if step.memory:
        most = max(sum(parts.values()) for curve in step.memory for _, parts in curve)
        yield "most bytes on a rank", spell_bytes(most)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
