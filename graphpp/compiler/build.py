"""Lower the captured graphs of a call for its table. Ranks compare the result, `Lowered`, before anything runs.

Each part is computed once per distinct kind of microbatch. Nothing is compiled by a backend or sent; the model is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpp.backends.regions import SizedCall
from graphpp.compiler import facts, overlap
from graphpp.compiler.compile_graph import CompiledGraph, freed_windows, held_by_ranks, offload_windows, programs_of
from graphpp.compiler.compile_regions import RegionCache
from graphpp.compiler.request import CompileRequest
from graphpp.errors import BatchError, GraphPPError, ScheduleError
from graphpp.parallel.facts import Facts
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.stage.outline_regions import cost_with_regions
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.program import Buffer, Parameter, PipelineProgram, WovenProgram
from graphpp.runtime.program_costs import costs_of_microbatches
from graphpp.schedules.check.schedule_under_check import ScheduleUnderCheck
from graphpp.schedules.check.step_memory import check_memory
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Lowered:
    """A call, lowered for this rank. `graphs` and `programs` have one entry per microbatch.

    `programs`: under a backend, this rank's stages call `region_calls`, which are not compiled yet. `windows`: the offloaded
    values of all ranks. `woven`: the programs of this rank's overlapped actions. `collectives`: by process group, the
    collectives of a step in the order in which this rank issues them. `groups_of_model`: the process groups of the model's own
    collectives, which exclude gathers of sharded parameters.
    """

    graphs: tuple[CompiledGraph, ...]
    table: CheckedTable
    local: tuple[int, ...]
    programs: tuple[PipelineProgram, ...]
    region_calls: tuple[SizedCall, ...]
    sources: ProgramGraphs
    windows: tuple[OffloadWindow, ...]
    woven: tuple[WovenProgram, ...]
    collectives: Mapping[str, Sequence[str]]
    groups_of_model: frozenset[str]

    @property
    def schedule(self) -> Schedule:
        """The table that the ranks run, with sends and receives."""
        return self.table.running

    @cached_property
    def facts(self) -> Facts:
        """Facts that all ranks of the pipeline must agree on."""
        return facts.of_call([graph.facts for graph in _distinct(self.graphs)], self.table)

    @cached_property
    def replica_facts(self) -> Facts:
        """Facts that ranks which average their gradients must agree on."""
        known = facts.of_replica([self.programs[0].stages[stage] for stage in self.local], self.table)
        return known.adding(facts.of_layers(self.programs, self.local)) if self.programs[0].gathers_layers else known


def lowered(
    request: CompileRequest,
    graphs: Sequence[CompiledGraph],
    table: CheckedTable,
    backend: RegionCache | None,
    memory_cap: Sequence[int] | None = None,
) -> Lowered:
    """Lower the graphs of a call (one per microbatch) for its table. `memory_cap`: bytes allowed on each rank.

    Raises `ScheduleError` if the table does not fit the graphs or the cap, `BatchError` if the microbatches cannot share a
    step.
    """
    place = request.place
    programs, windows = checked_programs(request, graphs, table, memory_cap)
    local = tuple(stage for stage, rank in table.running.rank_of_stage.items() if rank == place.rank)
    calls: tuple[SizedCall, ...] = ()
    if backend is not None:
        programs, calls = backend.outlined(graphs, programs, local)
    sources = ProgramGraphs.joined(graph.sources for graph in _distinct(graphs))
    dump = graphs[0].dump
    watch = dump.woven if dump is not None else overlap.unwatched
    cost = cost_with_regions(request.options.parallel.node_seconds() or OpCosts.of(place.device.type))
    row = overlap.ProgramRow(table.running.table[place.rank], programs, sources)
    row = overlap.in_best_order(row, cost, watch if backend is None else overlap.unwatched)  # dumps show no regions
    woven = overlap.woven(row, cost, watch)
    return Lowered(
        graphs=tuple(graphs),
        table=table,
        local=local,
        programs=tuple(row.programs),
        region_calls=calls,
        sources=sources,
        windows=windows,
        woven=tuple(emitted for _, emitted in woven.values()),
        collectives=overlap.collectives_of(row, woven),
        groups_of_model=overlap.groups_of_model(row),
    )


def checked_programs(
    request: CompileRequest,
    graphs: Sequence[CompiledGraph],
    table: CheckedTable,
    memory_cap: Sequence[int] | None = None,
) -> tuple[list[PipelineProgram], tuple[OffloadWindow, ...]]:
    """The stage programs of each microbatch and the offload windows of all ranks, checked as in `lowered`."""
    distinct = _distinct(graphs)
    _check_ranks(table.plain, distinct)
    _check_forward_order(table, distinct)
    programs = programs_of(request, graphs, table)
    windows = offload_windows(request, distinct, programs, table)
    if memory_cap is not None:
        _check_memory(request, graphs[0], programs, table, freed_windows(request, windows), memory_cap)
    return programs, windows


def check_same_results(graphs: Sequence[CompiledGraph]) -> None:
    """Raise `BatchError` if the graphs of one step's microbatches produce different kinds of results."""
    usual = _results(graphs[0])
    for graph in _distinct(graphs):
        for kind, found in _results(graph).items():
            if found != usual[kind]:
                raise BatchError(
                    f"microbatch {graphs.index(graph)} has a shape or structure for which the model makes other {kind} than "
                    "for microbatch 0: run them in steps of their own."
                )


def check_homes(first: CompiledGraph, graph: CompiledGraph) -> None:
    """Raise `GraphPPError` if a graph reads a parameter or written buffer on a rank where the first graph did not place it.

    The tensor would never be updated on that rank.
    """
    homes = {fqn: set(ranks) for fqn, ranks in first.holders.items()}
    for stage, fqn in first.written_buffers():
        homes.setdefault(fqn, set()).add(first.plan.rank_of_stage[stage.index])
    for stage in graph.program.stages:
        rank = graph.plan.rank_of_stage[stage.index]
        for role in stage.inputs:
            if isinstance(role, Parameter | Buffer) and rank not in homes.get(role.fqn, {rank}):
                raise GraphPPError(
                    f"{role.fqn} is kept on rank {min(homes[role.fqn])}, but for this batch, or in this mode, stage "
                    f"{stage.index} on rank {rank} reads it, where it is never updated. Call the module once, "
                    "choose a split that keeps its users together, or make the pipeline with an example of the call that "
                    "trains it."
                )


def _distinct(graphs: Iterable[CompiledGraph]) -> list[CompiledGraph]:
    """Each graph once, in order of first use."""
    return list({id(graph): graph for graph in graphs}.values())


def _results(graph: CompiledGraph) -> dict[str, object]:
    loss, stages = graph.program.loss, graph.program.stages
    return {
        "outputs": (str(graph.captured.output_spec), graph.captured.output_leaves),
        "numbers to report": graph.program.metrics,
        "losses": loss.dtype if loss is not None else None,
        "gradients": [sorted(stage.gradients) for stage in stages] + [sorted(graph.program.partial)],
        # A graph that only reads a buffer may read it in its backward, before or after another microbatch writes it.
        "new values of buffers": [sorted(stage.written_buffers) for stage in stages],
    }


def _check_forward_order(table: CheckedTable, graphs: Iterable[CompiledGraph]) -> None:
    """Raise `ScheduleError` if a stage that writes buffers runs its forwards in another order than the microbatches'."""
    orders = table.forward_orders()
    for stage, fqn in (pair for graph in graphs for pair in graph.written_buffers()):
        order = orders.get(stage.index, [])
        if order != sorted(order):
            raise ScheduleError(
                f"stage {stage.index} writes the buffer {fqn}, and the schedule runs its forwards in the order "
                f"{order}: a plain loop would write it in microbatch order. Reorder the forwards."
            )


def _check_ranks(table: Schedule, graphs: Iterable[CompiledGraph]) -> None:
    """Raise `ScheduleError` if this table moves a stage to another rank than the one with its parameters."""
    for graph in graphs:
        before, now = graph.plan.rank_of_stage, table.rank_of_stage
        for stage in (stage for stage, rank in before.items() if now[stage] != rank):
            raise ScheduleError(
                f"for {table.microbatches} microbatches the schedule {table.name!r} puts stage {stage} on rank {now[stage]}, "
                f"and for {graph.plan.schedule.microbatches} it put it on rank {before[stage]}, where its parameters are: "
                "give every number of microbatches the same ranks, or step with one number."
            )


def _check_memory(
    request: CompileRequest,
    first: CompiledGraph,
    programs: Sequence[PipelineProgram],
    table: CheckedTable,
    windows: Sequence[OffloadWindow],
    cap: Sequence[int],
) -> None:
    """Raise `ScheduleError` if a rank needs more bytes than `cap` allows."""
    case = ScheduleUnderCheck(table.running, table.running.stages, table.running.microbatches)
    costs, held = costs_of_microbatches(programs, table.flow), held_by_ranks(request, first, programs, table)
    check_memory(case, costs, cap, windows, held)
