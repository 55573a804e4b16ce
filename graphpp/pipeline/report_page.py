"""The report page of a pipeline: plan, simulated step, measured step, memory, boundaries, run (`graphpp/report/` lays it out).

Contract: without a profile the page marks the times of the step as estimated. Nothing runs, and every rank gets the same
`Page` except for the losses. Every rank of all replicas calls `write_report`; only the first rank of all writes `report.html`.
A value has one name on all boundaries that it crosses, so a relay is a name on neighbouring boundaries. A stage only relays a
value if none of its phases reads the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import fx

from graphpp._torch.symbols import considering
from graphpp.compiler.compile_graph import CompiledGraph, freed_windows, held_by_ranks, offload_windows, programs_of
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.stage_starts import pricing_of
from graphpp.errors import GraphPPError
from graphpp.passes.graph.joint_graph import describe_node
from graphpp.passes.text.naming import format_dtype
from graphpp.pipeline.graph_cache import GraphCache
from graphpp.pipeline.profile import Profile
from graphpp.planner.segments import estimated_costs
from graphpp.planner.tables import CheckedTable, Tables
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import BoundaryView, Page, RelayView, ValueView
from graphpp.report.page_html import write_page
from graphpp.report.run_view import RunView
from graphpp.report.timeline_view import TimelineView
from graphpp.runtime.program import Boundary, Phase, PipelineProgram, Received, Saved, Sent, TensorMeta, total_bytes
from graphpp.runtime.program_costs import costs_of_microbatches
from graphpp.schedules.simulate.bytes_over_time import KindCurve, bytes_over_time
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.state_bytes import sent_by_stage
from graphpp.units import spell_bytes, spell_time

_FILE = "report.html"
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
_FORWARD, _BACKWARD = "forward", "backward"
_PHASES = {_FORWARD: (Phase.FORWARD, Phase.EVALUATE), _BACKWARD: (Phase.BACKWARD, Phase.INPUT_GRAD)}


def write_report(
    folder: Path, request: CompileRequest, cache: GraphCache, profile: Profile | None, run: Callable[[], RunView]
) -> Path:
    """Write the page into the folder, created if missing; returns its path. Raises `GraphPPError` for a foreign profile."""
    first, so_far = cache.captured(), run()
    if folder.exists() and not folder.is_dir():
        raise GraphPPError(f"folder: {folder} is a file: give a folder, into which {_FILE} is written")
    if request.place.first_of_all:
        write_page(page_of(request, first, cache.tables, profile, so_far), folder / _FILE)
    return folder / _FILE


def page_of(request: CompileRequest, graph: CompiledGraph, tables: Tables, profile: Profile | None, run: RunView) -> Page:
    table = _table_of(graph, tables, profile)
    timeline, memory = _estimated(request, graph, table, None if profile is None else profile.costs)
    own = request.options.parallel.op_costs is not None
    note = _MEASURED if profile is not None else _BY_CALLER if own else _ESTIMATED
    measured = [] if profile is None else [TimelineView.of(profile.timeline)]
    boundaries, relays = boundary_views(graph)
    caps, ranks = request.options.memory.caps(request.place.ranks), table.running.ranks
    most = max((sum(parts.values()) for curve in memory for _, parts in curve), default=None)
    facts = {
        "schedule": table.plain.name,
        **{name: str(getattr(table.running, name)) for name in ("stages", "ranks", "microbatches")},
        "device": request.place.device.type,
        f"step, {'estimated' if profile is None else 'simulated'}": spell_time(timeline.makespan, "s"),
        **({} if profile is None else {"step, measured": spell_time(profile.timeline.makespan, "s")}),
        "parameters": f"{sum(each.parameters for each in graph.plan.stages):,}",
        **({} if most is None else {"most bytes on a rank": spell_bytes(most)}),
    }
    return Page(
        title=f"{type(request.model).__name__}: {table.plain.name} on {ranks} rank{'s' * (ranks != 1)}",
        facts=tuple(facts.items()),
        timelines=(TimelineView.of(timeline, note), *measured),
        memory=MemoryView.of(memory, caps, note=_BYTES) if memory else None,
        stages=tuple(each.view for each in graph.plan.stages),
        boundaries=boundaries,
        relays=relays,
        run=run,
    )


def _table_of(graph: CompiledGraph, tables: Tables, profile: Profile | None) -> CheckedTable:
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


def _estimated(
    request: CompileRequest, graph: CompiledGraph, table: CheckedTable, measured: Costs | None = None
) -> tuple[Timeline, tuple[KindCurve, ...]]:
    """The timeline of a table of this graph, and each rank's bytes by kind over time, empty for an evaluation."""
    programs = programs_of(request, [graph] * table.running.microbatches, table)
    timeline = simulate(table.running, _of_all(request, graph, programs, table) if measured is None else measured)
    if not table.training:
        return timeline, ()
    windows = freed_windows(request, offload_windows(request, [graph], programs, table))
    held = held_by_ranks(request, graph, programs, table)
    return timeline, bytes_over_time(timeline, costs_of_microbatches(programs, table.flow), held, windows)


def _of_all(
    request: CompileRequest, graph: CompiledGraph, programs: Sequence[PipelineProgram], table: CheckedTable
) -> Costs:
    """The costs of programs of which some stages have an R in some microbatches alone."""
    first, *others = (_costs(request, graph, each, table) for each in {id(each): each for each in programs}.values())

    def of(stage: int) -> StageCosts:
        known = [costs.stages[stage] for costs in (first, *others)]
        in_line = next((each for each in known if each.ahead is None), known[0])
        return replace(in_line, ahead=next((each.ahead for each in known if each.ahead is not None), None))

    return replace(first, stages=tuple(map(of, range(len(first.stages)))))


def _costs(request: CompileRequest, graph: CompiledGraph, program: PipelineProgram, table: CheckedTable) -> Costs:
    pricing = pricing_of(request)
    with considering(graph.values):
        costs = estimated_costs(program, graph.sources, pricing)
    shards = request.place.shards
    if table.shards is None or shards is None or program.gathers_layers:
        # Gathers of single layers are operations of the programs, which are not woven then.
        return replace(costs, hidden=0.0) if program.gathers_layers else costs
    gathered, reduced = sent_by_stage(graph.state(request), len(program.stages), shards)
    gathers, reductions = (tuple(pricing.message(round(nbytes)) for nbytes in each) for each in (gathered, reduced))
    return replace(costs, gathers=gathers, reductions=reductions)


def boundary_views(graph: CompiledGraph) -> tuple[tuple[BoundaryView, ...], tuple[RelayView, ...]]:
    makers = {node.name: node for node in graph.captured.joint.graph.nodes}
    relays = tuple(relay for way in _PHASES for relay in _relays(graph, way, makers))
    further = {(relay.way, relay.value.name) for relay in relays}
    views = []
    for each in graph.program.boundaries:
        relayed = [meta for way in _PHASES for meta in _values(each, way) if (way, meta.name) in further]
        values = (tuple(_view(meta, makers) for meta in _values(each, way)) for way in _PHASES)
        sizes = total_bytes(each.forward), total_bytes(each.backward), total_bytes(relayed)
        views.append(BoundaryView(each.stage, *sizes, *values))
    return tuple(views), relays


def _values(boundary: Boundary, way: str) -> Sequence[TensorMeta]:
    return boundary.forward if way == _FORWARD else boundary.backward


def _view(meta: TensorMeta, makers: Mapping[str, fx.Node]) -> ValueView:
    maker = describe_node(makers[meta.name]) if meta.name in makers else ""
    return ValueView(meta.name, meta.nbytes, f"{format_dtype(meta.dtype)}{list(meta.shape)}", maker)


def _relays(graph: CompiledGraph, way: str, makers: Mapping[str, fx.Node]) -> Iterator[RelayView]:
    crossed: dict[str, list[int]] = {}
    metas: dict[str, TensorMeta] = {}
    for boundary in graph.program.boundaries:
        for meta in _values(boundary, way):
            crossed.setdefault(meta.name, []).append(boundary.stage)
            metas[meta.name] = meta
    for name, stages in crossed.items():
        if len(stages) > 1:
            low, high = stages[0], stages[-1] + 1
            ends = (low, high) if way == _FORWARD else (high, low)
            unused = tuple(stage for stage in range(low + 1, high) if not _reads(graph, stage, name, way))
            yield RelayView(_view(metas[name], makers), *ends, way, unused)


def _reads(graph: CompiledGraph, stage: int, name: str, way: str) -> bool:
    """Whether a stage uses a value other than by sending it on."""
    for phase, item in graph.program.stages[stage].programs.items():
        for node in graph.sources.of(item).graph.nodes:
            if node.op == "placeholder" and node.meta["role"] in (Received(name), Saved(name)):
                passing = phase in _PHASES[way] and set(item.outputs) & {Sent(name)} and Saved(name) not in item.outputs
                if not passing or any(user.op != "output" for user in node.users):
                    return True
    return False
