"""Emit stage programs: render and load every phase graph, and list the parameters and buffers that each stage owns.

Contract: a parameter or buffer belongs to each stage whose programs read it or compute its gradient or new value. An unused one
belongs to the first stage that calls its module, else to that of the module's nearest ancestor with a call, else to stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from graphpp.passes.graph.aliases import root, shared_results
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.joint_graph import JointGraph, tensor_meta
from graphpp.passes.graph.liveness import live_bytes, sent_alone
from graphpp.passes.graph.name_sizes import symbolic_sizes
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.graph.stage_graphs import F, PhaseGraph, StagedGraphs
from graphpp.passes.stage.gather_layers import in_order
from graphpp.passes.stage.outline_regions import OutlinedGraph
from graphpp.passes.text.render import render
from graphpp.runtime import program
from graphpp.runtime.program import Buffer, Parameter, Phase, PipelineProgram, Program, StageProgram

Calls = dict[str, list[int]]
"""By module call: the stage of each of its forward operations, in order."""


def emit(joint: JointGraph, staged: StagedGraphs) -> PipelineProgram:
    count = len(staged.saved)
    used = [_used(staged, stage) for stage in range(count)]
    calls = _stages_of_calls(joint)
    parameters = _owned(used, joint.parameters, Parameter, calls)
    buffers = _owned(used, joint.buffers, Buffer, calls)
    stages = tuple(
        StageProgram(
            index=stage,
            programs=_programs(staged, stage, joint.training),
            parameters=parameters[stage],
            buffers=buffers[stage],
            saved=staged.saved[stage],
            saved_memory=staged.saved_memory[stage],
            kept_memory=staged.kept_memory[stage] if staged.kept_memory else (),
            unread_memory=staged.unread_memory[stage] if staged.unread_memory else (),
            recomputed_memory=staged.recomputed_memory[stage] if staged.recomputed_memory else (),
            waiting_memory=staged.waiting_memory[stage] if staged.waiting_memory else (),
            modules=_modules(calls, stage),
            constants={role.name: joint.constants[role.name] for role in used[stage] if isinstance(role, program.Constant)},
            hoisted=_program(staged.hoisted[stage], Phase.HOIST) if stage in staged.hoisted else None,
        )
        for stage in range(count)
    )
    loss = [tensor_meta(node) for role, node in joint.outputs() if isinstance(role, program.Loss)]
    metrics = {role.name: node.meta["val"].dtype for role, node in joint.outputs() if isinstance(role, program.Metric)}
    sizes: dict[str, Any] = {}
    for each in (*staged.graphs.values(), *staged.hoisted.values()) if joint.symbols is not None else ():
        sizes |= symbolic_sizes(each.graph)
    loss_meta = loss[0] if loss else None
    return PipelineProgram(stages, staged.boundaries, loss_meta, metrics, sizes, partial=frozenset(joint.partial))


def _programs(staged: StagedGraphs, stage: int, training: bool) -> dict[Phase, Program]:
    if not training:
        return {Phase.EVALUATE: _program(staged.graphs[F, stage], Phase.EVALUATE)}
    own = {phase: _program(each, phase) for (phase, index), each in staged.graphs.items() if index == stage}
    return {phase: replace(item, fused=staged.fused and phase.is_backward) for phase, item in own.items()}


def _program(source: PhaseGraph, phase: Phase) -> Program:
    rendered = render(source.graph, f"stage {source.stage}, {phase.label}")
    run = rendered.load(f"<graphpp stage {source.stage} {phase.label}>")
    return Program(
        source.stage,
        phase,
        source.inputs,
        source.outputs,
        run,
        rendered.text,
        shared_results(source.graph),
        live_bytes(source.graph),
        sent_alone(source.graph),
        layers=in_order(source.graph, source.layers),
        has_collectives=any(map(is_collective, source.graph.nodes)),
    )


def emit_outlined(item: Program, outlined: OutlinedGraph) -> Program:
    """A program that calls compiled regions and computes the results of `item`, whose graph was outlined.

    Two results of a compiled region may share memory, so every result of a region, and every view of one, is `shared`.
    """
    source = outlined.phase_graph
    rendered = render(source.graph, f"stage {source.stage}, {source.phase.label}, {len(outlined.calls)} regions")
    run = rendered.load(f"<graphpp stage {source.stage} {item.phase.label} compiled>")
    results: Sequence[fx.Node] = source.graph.output_node().args[0]  # type: ignore[assignment]
    read = ((index, source.target) for index, node in enumerate(results) for source in root(node).all_input_nodes)
    from_regions = {index for index, target in read if isinstance(target, RegionCall)}
    layers, shared = in_order(source.graph, item.layers), item.shared | from_regions
    return replace(item, inputs=source.inputs, run=run, source=rendered.text, shared=shared, layers=layers)


def emit_reordered(item: Program, source: PhaseGraph) -> Program:
    """A program that runs the operations of `item` in the order of `source`, which takes no more memory."""
    rendered = render(source.graph, f"stage {source.stage}, {item.phase.label}")
    return replace(item, run=rendered.load(f"<graphpp stage {source.stage} {item.phase.label}>"), source=rendered.text)


def _used(staged: StagedGraphs, stage: int) -> set[object]:
    """The roles that the phases of a stage read, and the parameters and buffers whose gradients or updates they compute."""
    roles: set[object] = set(staged.hoisted[stage].inputs) if stage in staged.hoisted else set()
    for (_, index), each in staged.graphs.items():
        if index == stage:
            roles.update(each.inputs)
            roles.update(Parameter(role.fqn) for role in each.outputs if isinstance(role, program.Gradient))
            roles.update(Parameter(role.fqn) for role in each.inputs if isinstance(role, program.ParameterRows))
            roles.update(Buffer(role.fqn) for role in each.outputs if isinstance(role, program.BufferUpdate))
    return roles


def _owned(used: list[set[object]], fqns: Iterable[str], kind: Callable[[str], object], calls: Calls) -> list[tuple[str, ...]]:
    owned: list[list[str]] = [[] for _ in used]
    for fqn in fqns:
        stages = [stage for stage, roles in enumerate(used) if kind(fqn) in roles]
        for stage in stages or [_nearest(fqn, calls)]:
            owned[stage].append(fqn)
    return [tuple(names) for names in owned]


def _nearest(fqn: str, calls: Calls) -> int:
    """The stage of the first call of the longest prefix of `fqn` that has a call."""
    parts = fqn.split(".")[:-1]
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for call, stages in calls.items():
            if call == prefix or call.startswith(prefix + "."):
                return stages[0]
    return 0


def _stages_of_calls(joint: JointGraph) -> Calls:
    stages: Calls = {}
    for node in joint.computed():
        if not node.meta["backward"] and node.meta["stage"] is not None:
            for call in node.meta["calls"]:
                stages.setdefault(call, []).append(node.meta["stage"])
    return stages


def _modules(calls: Calls, stage: int) -> tuple[str, ...]:
    """The calls that lie within a stage; if there is none, the innermost ones of which a part does."""
    some = [call for call, stages in calls.items() if stage in stages]
    whole = (call for call in some if {*calls[call]} == {stage})
    return tuple(whole) or tuple(call for call in some if not any(other.startswith(f"{call}.") for other in some))
