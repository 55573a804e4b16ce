"""From the captured graphs of a call and its table to all that the ranks agree on before anything runs.

Contract
    in   the graph of each microbatch, a checked table
    out  `Lowered`: a value. It holds the programs of each microbatch, the values that are offloaded, the woven programs of this
         rank, the collectives of a step, and the facts that the ranks compare. Each of them is computed once, for each
         distinct kind of microbatch and not for each microbatch.
    Nothing is compiled by a backend, nothing is sent, and the model stays as it is.
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
    """One call, lowered for this rank. `graphs` and `programs` are those of each microbatch.

    `programs`: under a backend, this rank's stages call the regions in `region_calls`, which are still to be compiled.
    `windows`: the offloaded values of all ranks. `woven`: the programs of this rank's overlapped actions. `collectives`: by
    process group, the collectives of the programs of a step in the order in which this rank issues them; `groups_of_model`: the
    groups of those that are not gathers of sharded parameters.
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
        """The lines that all ranks of the pipeline must have alike."""
        return facts.of_call([graph.facts for graph in _distinct(self.graphs)], self.table)

    @cached_property
    def replica_facts(self) -> Facts:
        """The lines that ranks which average their gradients must have alike."""
        known = facts.of_replica([self.programs[0].stages[stage] for stage in self.local], self.table)
        return known.adding(facts.of_layers(self.programs, self.local)) if self.programs[0].gathers_layers else known


def lowered(
    request: CompileRequest,
    graphs: Sequence[CompiledGraph],
    table: CheckedTable,
    backend: RegionCache | None,
    memory_cap: Sequence[int] | None = None,
) -> Lowered:
    """Lower the graphs of a call's microbatches for its table.

    `memory_cap`: the bytes that each rank may hold. Raises `ScheduleError` where the table does not fit the
    graphs or the cap, `BatchError` where the microbatches cannot share a step.
    """
    place = request.place
    programs, windows = checked_programs(request, graphs, table, memory_cap)
    local = tuple(stage for stage, rank in table.running.rank_of_stage.items() if rank == place.rank)
    calls: tuple[SizedCall, ...] = ()
    if backend is not None:
        programs, calls = backend.outlined(graphs, programs, local)
    sources = ProgramGraphs.joined(graph.sources for graph in _distinct(graphs))
    row = overlap.ProgramRow(table.running.table[place.rank], programs, sources)
    dump = graphs[0].dump
    cost = cost_with_regions(request.options.parallel.node_seconds() or OpCosts.of(place.device.type))
    woven = overlap.woven(row, cost, dump.woven if dump is not None else lambda *_: None)
    return Lowered(
        graphs=tuple(graphs),
        table=table,
        local=local,
        programs=tuple(programs),
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
    """The stage programs of each microbatch and the offloaded values of all ranks, checked against the table.

    Raises `ScheduleError` and `BatchError`, as `lowered` does.
    """
    distinct = _distinct(graphs)
    _check_ranks(table.plain, distinct)
    _check_forward_order(table, distinct)
    programs = programs_of(request, graphs, table)
    windows = offload_windows(request, distinct, programs, table)
    if memory_cap is not None:
        _check_memory(request, graphs[0], programs, table, freed_windows(request, windows), memory_cap)
    return programs, windows


def check_same_results(graphs: Sequence[CompiledGraph]) -> None:
    """Raise `BatchError` where graphs cannot serve microbatches of one step: they must make the same results."""
    usual = _results(graphs[0])
    for graph in _distinct(graphs):
        for kind, found in _results(graph).items():
            if found != usual[kind]:
                raise BatchError(
                    f"microbatch {graphs.index(graph)} has a shape or structure for which the model makes other {kind} than "
                    "for microbatch 0: run them in steps of their own."
                )


def check_homes(first: CompiledGraph, graph: CompiledGraph) -> None:
    """Raise `GraphPPError` where a graph reads a parameter or written buffer off the rank that the first graph gave it.

    Nobody would update the tensor there.
    """
    homes = {fqn: set(ranks) for fqn, ranks in first.ranks_of_parameter.items()}
    for stage, fqn in first.written_buffers():
        homes.setdefault(fqn, set()).add(first.plan.rank_of_stage[stage.index])
    for stage in graph.program.stages:
        rank = graph.plan.rank_of_stage[stage.index]
        for role in stage.inputs:
            if isinstance(role, Parameter | Buffer) and rank not in homes.get(role.fqn, {rank}):
                raise GraphPPError(
                    f"{role.fqn} is kept on rank {min(homes[role.fqn])}, but for this batch, or in this mode, stage "
                    f"{stage.index} on rank {rank} reads it, where it is never updated. Choose a split that keeps its "
                    "users together, or make the pipeline with an example of the call that trains it."
                )


def _distinct(graphs: Iterable[CompiledGraph]) -> list[CompiledGraph]:
    """Each graph once, in the order of their first microbatches."""
    return list({id(graph): graph for graph in graphs}.values())


def _results(graph: CompiledGraph) -> dict[str, object]:
    loss, stages = graph.program.loss, graph.program.stages
    return {
        "outputs": (str(graph.captured.output_spec), graph.captured.output_leaves),
        "numbers to report": graph.program.metrics,
        "losses": loss.dtype if loss is not None else None,
        "gradients": [sorted(stage.gradients) for stage in stages] + [sorted(graph.program.partial)],
        # A graph that does not write a buffer may read it in its backward, before or after another microbatch writes it.
        "new values of buffers": [sorted(stage.written_buffers) for stage in stages],
    }


def _check_forward_order(table: CheckedTable, graphs: Iterable[CompiledGraph]) -> None:
    """Raise `ScheduleError` where a stage that writes buffers would see the microbatches in another order than a plain loop."""
    orders = table.forward_orders()
    for stage, fqn in (pair for graph in graphs for pair in graph.written_buffers()):
        order = orders.get(stage.index, [])
        if order != sorted(order):
            raise ScheduleError(
                f"stage {stage.index} writes the buffer {fqn}, and the schedule runs its forwards in the order "
                f"{order}: a plain loop would write it in microbatch order. Reorder the forwards."
            )


def _check_ranks(table: Schedule, graphs: Iterable[CompiledGraph]) -> None:
    """Parameters stay on the ranks that the first table put them on, whatever table a number of microbatches gets."""
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
    """Raise `ScheduleError` where more bytes are alive on a rank than the caller allows; all else was checked before."""
    case = ScheduleUnderCheck(table.running, table.running.stages, table.running.microbatches)
    costs, held = costs_of_microbatches(programs, table.flow), held_by_ranks(request, first, programs, table)
    check_memory(case, costs, cap, windows, held)
