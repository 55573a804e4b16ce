"""The segments of a forward: the pieces between neighbouring places where a stage may start, with their costs.

Contract
    in   a captured joint graph, its module calls, the passes that the plan enables, the seconds of programs
    out  `Segments`; `Segments.stages(cut)` gives the costs and state of stages, each of neighbouring segments
    A place is the start of a module call outside of the repeated layers, of a layer, or of a module that a layer calls
    directly. No place lies between a write and a read of one buffer. The graph is not changed.

A stage's seconds are the sums of its segments'. Its bytes are an upper bound: a value that two of its segments save counts
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphpp.options.split import ModuleCall
from graphpp.passes.graph.collectives import is_started
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.passes.provenance import ProgramGraphs
from graphpp.planner.layers import repeated_layers
from graphpp.runtime import program
from graphpp.runtime.program import Boundary, Phase, PipelineProgram, StageProgram
from graphpp.runtime.program_costs import costs_of_programs
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.state_bytes import StateBytes

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_MOST = 256  # places; more would take minutes to lower

Cut = tuple[int, ...]
"""The first segment of each stage, ascending; the first is 0."""


@dataclass(frozen=True)
class Segments:
    """`starts`: first operation of each segment; `costs`, `state`: with one entry per segment instead of per stage."""

    starts: tuple[int, ...]
    costs: Costs
    state: tuple[StateBytes, ...] = ()

    def stage(self, first: int, end: int) -> StageCosts:
        """The costs of a stage of the segments from `first` to before `end`."""
        return _joined(self.costs.stages[first:end])

    def stages(self, cut: Cut) -> tuple[Costs, tuple[StateBytes, ...]]:
        ends = [*cut[1:], len(self.starts)]
        each = tuple(map(self.stage, cut, ends))
        both = self.costs.sends_forward, self.costs.sends_backward
        on, back = (tuple(sends[first - 1] for first in cut[1:]) if sends else () for sends in both)
        stage_of = [stage for stage, (first, end) in enumerate(zip(cut, ends, strict=True)) for _ in range(first, end)]
        costs = replace(self.costs, stages=each, sends_forward=on, sends_backward=back)

        def stages_of(segments: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted({stage_of[segment] for segment in segments}))

        return costs, tuple(replace(one, readers=stages_of(one.readers), makers=stages_of(one.makers)) for one in self.state)


def _joined(parts: Sequence[StageCosts]) -> StageCosts:
    """The costs of segments that form one stage: forwards run in order, backwards in reverse."""
    saved, exchanges = sum(part.saved_bytes for part in parts), any(part.exchanged for part in parts)
    lines = {kind: [part.lines(kind) for part in parts] for kind in _KINDS} if exchanges else {}
    kept = [part.saved_bytes if part.kept_bytes is None else part.kept_bytes for part in parts]
    peaks = {kind: _peak(parts, kept, kind) for kind in sorted({kind for part in parts for kind in part.peak_bytes})}
    return StageCosts(
        forward=sum(part.forward for part in parts),
        input_grad=sum(part.input_grad for part in parts),
        weight_grad=sum(part.weight_grad for part in parts),
        backward=sum(part.of(Kind.B) for part in parts),
        saved_bytes=saved,
        kept_bytes=sum(kept) if any(part.kept_bytes is not None for part in parts) else None,
        peak_bytes=peaks,
        received_bytes=_of_ends(parts, "received_bytes"),
        sent_bytes=_of_ends(parts, "sent_bytes"),
        exchanged={kind: sum(each.exchanged for each in own) for kind, own in lines.items()},
        overlapped={kind: sum(each.both for each in own) for kind, own in lines.items()},
        ahead=_joined_ahead(parts) if any(part.ahead is not None for part in parts) else None,
    )


def _joined_ahead(parts: Sequence[StageCosts]) -> StageCosts:
    """The costs of segments that form one stage, behind an R, which recomputes the last segment first."""
    each = [part.behind(0.0, part.peak_bytes) if part.ahead is None else part.ahead for part in parts]
    most, before, after = 0, sum(part.saved_bytes for part in parts), 0
    for part, own in zip(reversed(parts), reversed(each), strict=True):
        before -= part.saved_bytes
        running = own.saved_bytes if part.ahead is None else own.running_bytes(Kind.F)
        most = max(most, before + max(part.saved_bytes, running) + after)
        after += own.saved_bytes
    joined = _joined(each)
    return replace(joined, peak_bytes={**joined.peak_bytes, Kind.F: most})


def _of_ends(parts: Sequence[StageCosts], name: str) -> dict[Kind, int]:
    """By kind, the bytes that enter or leave a stage: a forward enters at its first segment and leaves at its last."""
    enters, leaves = getattr(parts[0], name), getattr(parts[-1], name)
    forward, backward = (enters, leaves) if name == "received_bytes" else (leaves, enters)
    found = {kind: forward[kind] for kind in (Kind.F,) if kind in forward}
    return found | {kind: backward[kind] for kind in (Kind.B, Kind.I) if kind in backward}


def _peak(parts: Sequence[StageCosts], kept: Sequence[int], kind: Kind) -> int:
    """The most bytes alive while the segments run in sequence: those of the running segment and those that others hold."""
    saved = [part.saved_bytes for part in parts]
    before = kept if kind is Kind.W else saved
    after = kept if kind is Kind.I else [0] * len(parts)
    return max(
        sum(before[:at]) + part.peak_bytes.get(kind, saved[at]) + (sum(after[at + 1 :]) if kind is not Kind.F else 0)
        for at, part in enumerate(parts)
    )


# ---------------------------------------------------------------------------------- the places


def places(joint: JointGraph, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The forward positions where a stage may start, ascending, the first 0. If there are more than `_MOST`, places within
    layers are left out."""
    layers = repeated_layers(calls)
    inside = [call for call in calls if any(_holds(layer, call) for layer in layers)]
    names = {layer.module for layer in layers}
    within = {call.fqn for call in inside}
    outside = {call.position for call in calls if call.fqn not in within}
    found = outside | {call.position for call in inside if call.module.rpartition(".")[0] in names}
    end = max((call.end for call in calls), default=0)
    bound = list(_bound(joint))
    for starts in (found, outside):
        free = {at for at in starts if at < end and not any(first < at <= last for first, last in bound)}
        if len(free) <= _MOST:
            break
    return tuple(sorted({0, *free}))


def _holds(layer: ModuleCall, call: ModuleCall) -> bool:
    return layer.position <= call.position and call.end <= layer.end and call.fqn != layer.fqn


def _bound(joint: JointGraph) -> Iterable[tuple[int, int]]:
    """(first, last) position of the operations that read or write one updated buffer: they belong in one stage."""
    inputs = joint.inputs()
    for role, update in joint.outputs():
        if isinstance(role, program.BufferUpdate) and program.Buffer(role.fqn) in inputs:
            users = [update, *inputs[program.Buffer(role.fqn)].users]
            at = [node.meta["position"] for node in users if node.meta.get("position", -1) >= 0]
            if at:
                yield min(at), max(at)


# ---------------------------------------------------------------------------------- the costs


ProgramSeconds = Mapping[tuple[int, Phase], float]
"""Seconds of programs by stage and phase."""


@dataclass(frozen=True)
class Pricing:
    """Seconds of all programs, and of a message of a given size between two ranks. Messages overlap computations. `operation`:
    seconds of an operation, of which the share of collectives in a program's seconds follows."""

    programs: Callable[[PipelineProgram, ProgramGraphs], ProgramSeconds]
    message: Callable[[int], float]
    operation: Cost

    def exchanged(self, graph: fx.Graph) -> float:
        """The share of collectives in the seconds of a program, at most 1."""
        total = sum(map(self.operation, graph.nodes))
        return sum(map(self.operation, filter(is_started, graph.nodes))) / total if total else 0.0


def seconds_by_operations(cost: Cost) -> Callable[[PipelineProgram, ProgramGraphs], ProgramSeconds]:
    """A program's seconds as the sum of its operations'."""

    def programs(lowered: PipelineProgram, sources: ProgramGraphs) -> ProgramSeconds:
        items = {(stage.index, phase): item for stage in lowered.stages for phase, item in stage.programs.items()}
        return {at: sum(map(cost, sources.of(item).graph.nodes)) for at, item in items.items()}

    return programs


def segments_of(
    joint: JointGraph,
    starts: Sequence[int],
    options: LoweringOptions,
    pricing: Pricing,
    state: Callable[[Sequence[StageProgram]], tuple[StateBytes, ...]],
) -> Segments:
    """The segments that start at these positions; `state` gives the bytes of the state that stages read."""
    sources = ProgramGraphs()
    lowered = lower(joint.copy(), starts, sources.hook(), options)
    return Segments(tuple(starts), estimated_costs(lowered, sources, pricing), state(lowered.stages))


_WITHOUT_PAIRS = (Phase.EVALUATE, Phase.RECOMPUTE)  # programs that are no part of an OVERLAP_F_B


def estimated_costs(lowered: PipelineProgram, sources: ProgramGraphs, pricing: Pricing) -> Costs:
    """The costs of stages and messages: seconds from `pricing`, bytes from the programs. `sources`: the programs' graphs."""
    seconds = pricing.programs(lowered, sources)

    known = costs_of_programs(lowered)

    def stage_costs(stage: StageProgram) -> StageCosts:
        times = {phase: seconds[stage.index, phase] for phase in stage.programs}
        forward = times.get(Phase.FORWARD, times.get(Phase.EVALUATE, 0.0))
        whole = times.get(Phase.BACKWARD, 0.0)
        first, second = times.get(Phase.INPUT_GRAD, whole), times.get(Phase.WEIGHT_GRAD, 0.0)
        run = {phase: sources.of(item).graph for phase, item in stage.programs.items() if phase not in _WITHOUT_PAIRS}
        shares = {phase: pricing.exchanged(graph) for phase, graph in run.items()}
        exchanged = {Kind(phase.value): share * times[phase] for phase, share in shares.items() if share}
        own = replace(known.stages[stage.index], forward=forward, input_grad=first, weight_grad=second, backward=whole)
        found = replace(own, exchanged=exchanged)
        if found.ahead is None:
            return found
        behind: dict[Kind, float] = {kind: each for kind, each in exchanged.items() if kind is not Kind.F}
        ahead = replace(found.ahead, input_grad=first, weight_grad=second, backward=whole)
        again = replace(ahead, forward=times[Phase.RECOMPUTE], exchanged=behind)
        more = times[Phase.RECOMPUTE]
        return replace(found, input_grad=first + more, backward=whole + more, ahead=again)

    def sends(values: Callable[[Boundary], Sequence[program.TensorMeta]]) -> tuple[float, ...]:
        return tuple(pricing.message(sum(value.nbytes for value in values(each))) for each in lowered.boundaries)

    each = tuple(map(stage_costs, lowered.stages))
    on, back = sends(lambda boundary: boundary.forward), sends(lambda boundary: boundary.backward)
    return replace(known, stages=each, sends_forward=on, sends_backward=back)
