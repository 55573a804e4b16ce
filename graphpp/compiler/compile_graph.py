"""Cut a captured graph into stages, lower them, and plan memory, offloading and sharding.

- Given the captured graph, options and table, the result is the same on every rank: each rank compiles all stages.
- Later graphs of a model are cut before the same module calls as its first graph.
- The model's forward runs on tensors without data. The model is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from graphpp._torch import aot
from graphpp._torch.symbols import Values, considering, hint
from graphpp.capture.outputs import output_shapes
from graphpp.capture.trace import CapturedGraph
from graphpp.compiler import facts
from graphpp.compiler.dumps.dump import Dump
from graphpp.compiler.exchanged_values import check_gathered_experts
from graphpp.compiler.held_state import held_by_rank, kept_outputs, state_bytes
from graphpp.compiler.program_variants import ProgramVariant, choices_of, sized_program, variant_of
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.stage_starts import fastest_starts, resolved_starts, same_starts
from graphpp.compiler.word_stages import check_parts
from graphpp.errors import ScheduleError
from graphpp.parallel.facts import Facts
from graphpp.passes.lower import PassResult, lower, lower_assigned
from graphpp.passes.provenance import ProgramGraphs
from graphpp.planner import offload_windows as offload
from graphpp.planner.layers import module_calls
from graphpp.planner.memory_plan import MemoryPlan
from graphpp.planner.microbatch_count import stages_of
from graphpp.planner.plan import Plan
from graphpp.planner.shard_plan import ShardPlan, layer_bytes, layer_plan
from graphpp.planner.tables import CheckedTable
from graphpp.progress import working
from graphpp.runtime.dtensors import local_tensor
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.offloader import eviction_frees_memory
from graphpp.runtime.parameter_rows import ranks_of_parameters, whole_name
from graphpp.runtime.program import Buffer, Constant, Input, Parameter, PipelineProgram, StageProgram
from graphpp.runtime.program_costs import costs_of_microbatches
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.state_bytes import HeldBytes, StateBytes, sent_by_stage

TableFor = Callable[[int], CheckedTable]
"""The checked table for a number of stages."""


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """A captured graph, cut into stages and planned.

    `program`: the stage programs of the variant that the first table asked for. `boundaries`: for each stage but the first, the
    module calls from its start on, in order. `variants`: all stage programs lowered so far. `values`, `general`: the sizes, and
    the graph with symbolic sizes that was specialised to them.
    """

    captured: CapturedGraph
    program: PipelineProgram
    plan: Plan
    boundaries: Sequence[Sequence[str]] = ()
    variants: dict[ProgramVariant, PipelineProgram] = field(default_factory=dict)
    sources: ProgramGraphs = field(default_factory=ProgramGraphs)
    dump: Dump | None = None
    values: Values | None = None
    general: CompiledGraph | None = None

    def at(self, values: Values) -> CompiledGraph:
        """This graph with symbolic sizes, specialised to one set of sizes."""
        variants = {variant: sized_program(program, values) for variant, program in self.variants.items()}
        own = next(variants[variant] for variant, program in self.variants.items() if program is self.program)
        return replace(self, program=own, variants=variants, values=values, general=self)

    @cached_property
    def facts(self) -> Facts:
        """Facts about code, split and programs that all ranks must agree on."""
        if self.general is not None:
            return self.general.facts
        return facts.of_graph(self.captured.joint, self.program)

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the model's output tensors for one microbatch."""
        with considering(self.values):
            return [tuple(map(hint, shape)) for shape in output_shapes(self.captured)]

    def local_stages(self, rank: int) -> list[StageProgram]:
        return [stage for stage in self.program.stages if self.plan.rank_of_stage[stage.index] == rank]

    def parameters(self, rank: int) -> set[str]:
        """FQNs of the parameters on `rank`, also where it has some rows of one (`parameter_rows.py`)."""
        return set(self.stages_of_parameter(rank))

    def stages_of_parameter(self, rank: int) -> dict[str, list[int]]:
        """For each parameter FQN on `rank`, the stages of the rank that read it."""
        found: dict[str, list[int]] = {}
        for stage in self.local_stages(rank):
            for fqn in dict.fromkeys(map(whole_name, stage.parameters)):
                found.setdefault(fqn, []).append(stage.index)
        return found

    def buffers(self, rank: int) -> set[str]:
        """FQNs of the buffers on `rank`."""
        return {fqn for stage in self.local_stages(rank) for fqn in stage.buffers}

    def reads(self, rank: int) -> set[str]:
        """Paths of the microbatch tensors that the stages of `rank` read."""
        stages = (stage for program in self.variants.values() or [self.program] for stage in program.stages)
        own = (stage for stage in stages if self.plan.rank_of_stage[stage.index] == rank)
        return {role.path for stage in own for role in stage.inputs if isinstance(role, Input)}

    @cached_property
    def ranks_of_parameter(self) -> dict[str, list[int]]:
        """For each parameter, its ranks in ascending order; the first one counts it in norms."""
        found: dict[str, set[int]] = {}
        for name, ranks in self.holders.items():
            found.setdefault(whole_name(name), set()).update(ranks)
        return {fqn: sorted(ranks) for fqn, ranks in found.items()}

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """The ranks of each parameter, and of rows that are a parameter of their own, by the names of the programs."""
        return ranks_of_parameters(self.program, self.plan.rank_of_stage)

    def copies(self, state: ModelState, rank: int) -> dict[str, torch.Tensor]:
        """This rank's tensors that other ranks read too, by name; without buffers that a forward writes."""
        written = {fqn for _, fqn in self.written_buffers()}
        roles = Counter[tuple[int, Parameter | Buffer | Constant]]()
        for stage in self.program.stages:
            shared = (role for role in stage.inputs if isinstance(role, Parameter | Buffer | Constant))
            roles |= Counter((self.plan.rank_of_stage[stage.index], role) for role in shared)
        ranks = Counter(role for _, role in roles)
        own = [role for at, role in roles if at == rank and ranks[role] > 1]
        constants = {role.name: self.captured.joint.constants[role.name] for role in own if isinstance(role, Constant)}
        fqns = [role.fqn for role in own if not isinstance(role, Constant) and role.fqn not in written]
        return {fqn: local_tensor(state.tensor(fqn)) for fqn in fqns} | constants

    def state(self, request: CompileRequest) -> tuple[StateBytes, ...]:
        """Bytes of parameters, gradients, optimizer state and buffers, by the stages that read them."""
        return state_bytes(request, self.captured.joint, self.program.stages)

    def written_buffers(self) -> Iterator[tuple[StageProgram, str]]:
        """(stage, FQN) of each buffer that a forward writes."""
        return ((stage, fqn) for stage in self.program.stages for fqn in stage.written_buffers)


def compile_graph(
    request: CompileRequest, captured: CapturedGraph, table_for: TableFor, first: CompiledGraph | None
) -> CompiledGraph:
    """Compile the stages of a captured graph for a table.

    `first`: the pipeline's first graph, whose split is reused (None: this graph is the first). Raises `SplitError`,
    `ScheduleError`.
    """
    options, training = request.options, captured.joint.training
    dump = Dump(options.debug.dump if request.dumps else None, request.place.rank, "train" if training else "eval")
    dump.captured(captured)
    request.watch(PassResult("capture", 0.0, captured.joint))
    check_gathered_experts(request, captured.joint)
    calls = module_calls(captured.joint)
    if first is not None:
        starts = same_starts(first.boundaries, calls)
    elif isinstance(options.split, str) and options.split == "auto":  # `==` on an array is element-wise
        starts = fastest_starts(request, captured.joint, calls, table_for(stages_of(options, request.place.ranks)))
    else:
        starts = resolved_starts(request, calls)
    table = table_for(len(starts))
    recomputed = table.recomputed_stages(options.memory.recompute is not None)
    variant, sources = variant_of(request, table), ProgramGraphs()
    hooks = dump.hook(table.plain), sources.hook(), request.watch

    def hook(passed: PassResult) -> None:
        for each in hooks:
            each(passed)

    with working("cutting the graph into stages"), aot.quick():
        program = lower(captured.joint, starts, hook, choices_of(request, captured.joint, variant))
    boundaries = [[call.fqn for call in calls if call.position >= start] for start in starts[1:]]
    plan = Plan.of(captured.joint, program, table.plain)
    check_parts(program, plan.rank_of_stage, request.place.ranks)
    graph = CompiledGraph(captured, program, plan, boundaries, {variant: program}, sources, dump)
    programs = programs_of(request, [graph] * len(recomputed), table)
    if training:
        plan = replace(plan, offload_windows=offload_windows(request, [graph], programs, table))
        plan = replace(plan, memory=_memory_plan(request, graph, programs, table, plan.offload_windows))
    graph = replace(graph, plan=replace(plan, sharding=_shard_plan(request, graph, programs, table)))
    dump.plan(graph.plan, table)
    return graph


def held_by_ranks(
    request: CompileRequest, graph: CompiledGraph, programs: Sequence[PipelineProgram], table: CheckedTable
) -> tuple[HeldBytes, ...]:
    """Bytes of parameters, gradients, optimizer state and buffers on each rank; `programs`: one per microbatch."""
    layers, state = layer_bytes(programs) if programs[0].gathers_layers else None, graph.state(request)
    if request.options.memory.outputs:
        state += (kept_outputs(graph.captured.joint, graph.program.stages, len(programs)),)
    return held_by_rank(request, state, table, layers)


def freed_windows(request: CompileRequest, windows: Sequence[OffloadWindow]) -> Sequence[OffloadWindow]:
    """The offload windows whose eviction frees device memory: none on the CPU."""
    return windows if eviction_frees_memory(request.place.device) else ()


def _memory_plan(
    request: CompileRequest,
    graph: CompiledGraph,
    programs: Sequence[PipelineProgram],
    table: CheckedTable,
    windows: Sequence[OffloadWindow],
) -> MemoryPlan:
    """Peak bytes of each rank under `table.running`; `programs`: one per microbatch."""
    held, freed = held_by_ranks(request, graph, programs, table), freed_windows(request, windows)
    peaks = step_peaks(table.running, costs_of_microbatches(programs, table.flow), held, freed)
    return MemoryPlan.of(peaks, graph.state(request), request.options.memory.optimizer)


def _shard_plan(
    request: CompileRequest, graph: CompiledGraph, programs: Sequence[PipelineProgram], table: CheckedTable
) -> ShardPlan | None:
    """The cost of sharded parameters under `table.running`; None if parameters are not sharded."""
    if table.shards is None or request.place.shards is None:
        return None
    if programs[0].gathers_layers:
        return layer_plan(table.running, programs, request.place.shards)
    shards = request.place.shards
    gathered, reduced = sent_by_stage(graph.state(request), len(graph.program.stages), shards)
    return ShardPlan.of(table.running, gathered, reduced, shards, request.options.parallel.keep)


def programs_of(request: CompileRequest, graphs: Sequence[CompiledGraph], table: CheckedTable) -> list[PipelineProgram]:
    """The stage programs of each microbatch; equal (graph, recomputed stages, stages with an R) share one object."""
    known: dict[tuple[int, frozenset[int], frozenset[int]], PipelineProgram] = {}
    programs = []
    recomputed = table.recomputed_stages(request.options.memory.recompute is not None)
    for graph, stages, ahead in zip(graphs, recomputed, table.stages_ahead(), strict=True):
        key = (id(graph), stages, ahead)
        if key not in known:
            split = table.splits_backward
            each = [ProgramVariant(split, at in stages, at in ahead) for at in range(len(graph.program.stages))]
            known[key] = _program(request, graph, each)
        programs.append(known[key])
    return programs


def offload_windows(
    request: CompileRequest, graphs: Sequence[CompiledGraph], programs: Sequence[PipelineProgram], table: CheckedTable
) -> tuple[OffloadWindow, ...]:
    """The periods in which saved values of any rank are in host memory; `programs`: one per microbatch."""
    choice = request.options.memory.offload
    if choice is None or not table.training:
        return ()
    if table.plain.recomputed_ahead:
        raise ScheduleError(
            f"memory.offload: the schedule {table.plain.name!r} has an R, whose values cannot be offloaded: "
            "leave out memory.offload, or take the Rs out of the table"
        )
    sources = ProgramGraphs.joined(graph.sources for graph in graphs)
    return offload.choose_windows(choice, table.plain, programs, lambda item: sources.of(item).graph)


def _program(request: CompileRequest, graph: CompiledGraph, each: Sequence[ProgramVariant]) -> PipelineProgram:
    """The stage programs in which each stage is of its variant."""
    variants = {variant: _variant(request, graph, variant) for variant in dict.fromkeys(each)}
    program = variants[each[0]]
    if len(variants) == 1:
        return program
    assert all(other.boundaries == program.boundaries for other in variants.values()), "recomputation changed what travels"
    return replace(program, stages=tuple(variants[variant].stages[stage] for stage, variant in enumerate(each)))


def _variant(request: CompileRequest, graph: CompiledGraph, variant: ProgramVariant) -> PipelineProgram:
    joint = graph.captured.joint
    if not joint.training:  # no backward to split or to recompute for
        return graph.program
    if variant not in graph.variants and graph.general is not None and graph.values is not None:
        general = _variant(request, graph.general, variant)
        symbols = graph.captured.joint.symbols
        assert symbols is not None and symbols.hold(graph.values), "a pass compared sizes, and these have another answer"
        graph.variants[variant] = sized_program(general, graph.values)
    if variant not in graph.variants:
        choices = choices_of(request, joint, variant)
        with aot.quick():
            graph.variants[variant] = lower_assigned(joint, len(graph.program.stages), graph.sources.hook(), choices)
    return graph.variants[variant]
