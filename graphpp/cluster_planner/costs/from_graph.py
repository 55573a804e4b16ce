"""Turn the captured graphs of a model, for some rows and for twice as many, into its costs. The joint graphs are modified.

A segment lies between neighbouring places where a stage may start: repeated layers, and module calls outside them.
`passes/lower.py` lowers each segment as a stage, so saved values, recomputation and messages match a pipeline that runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp._torch.symbols import hint
from graphpp.cluster_planner.costs.dims import growing_sizes
from graphpp.cluster_planner.costs.facts import note_facts
from graphpp.cluster_planner.costs.model_costs import (
    PHASES,
    ModelCosts,
    OffloadableSize,
    ParameterCosts,
    SegmentKind,
    Variant,
)
from graphpp.cluster_planner.costs.operations import ATTENTION, Size, operations_of, packet_of, size_of, summed
from graphpp.cluster_planner.costs.shortened import WholeModel
from graphpp.cluster_planner.costs.tensor_plan import Plan, ShardedParameters
from graphpp.errors import GraphPPError
from graphpp.options.recompute import Recompute, read_recompute
from graphpp.options.split import ModuleCall
from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.liveness import counts_in_peak, live_values
from graphpp.passes.graph.offloadable import LocalNeighbours, offloadable
from graphpp.passes.graph.stage_graphs import PhaseGraph, StagedGraphs
from graphpp.passes.lower import LoweringOptions, assigned, staged_graphs
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.hoist_per_step import find_step_invariants, hoist_per_step
from graphpp.planner import recompute_policy as policy
from graphpp.planner.layers import repeated_layers
from graphpp.planner.segments import places
from graphpp.runtime import program
from graphpp.schedules.table.actions import Kind

RECOMPUTE: tuple[str | None, ...] = (None, "selective", "full")
_CASTS = {torch.ops.aten._to_copy, torch.ops.aten.clone}
_SCALINGS = {torch.ops.aten.mul, torch.ops.aten.div}  # once, before a cast to float8: others are a layer's own
_TO_FLOAT8 = _SCALINGS | {torch.ops.aten.clamp}
_STACKED = 3  # dimensions of a parameter that holds the experts of a layer: experts, inputs, outputs


@dataclass(frozen=True)
class Captured:
    """A model whose graph has some of the repeated layers. `joint`, `larger`: its graphs for `rows` rows and for twice as many;
    `calls`: the module calls of both; `starts`: the first operation of each stage; `whole`: how stages make up the model."""

    joint: JointGraph
    larger: JointGraph
    rows: int
    calls: Sequence[ModuleCall]
    starts: tuple[int, ...]
    whole: WholeModel


def model_costs(captured: Captured, tensor_plan: Plan, expert_plan: Plan, device_type: str = "cuda") -> ModelCosts:
    """`device_type`: the device whose costs decide which recomputations are free. Raises `CaptureError`, `GraphPPError`."""
    joint, calls, whole = captured.joint, captured.calls, captured.whole
    shapes = {fqn: tuple(map(hint, meta.shape)) for fqn, meta in joint.parameters.items()}
    sharded = ShardedParameters.of(shapes, tensor_plan, expert_plan)
    with aot.quick():
        joint = assigned(joint, captured.starts)
        note_facts(joint, assigned(captured.larger, captured.starts), sharded)
        derived = _derived(joint, len(captured.starts))
        staged = {each: _staged(joint, calls, len(captured.starts), each, device_type) for each in RECOMPUTE}
        variants = {name: _variant(*found, whole.stage_of) for name, found in staged.items()}
    cut, first = staged[None]
    named = {node.name: node for node in cut.graph.nodes}
    crossing = [each.forward for each in first.boundaries], [each.backward for each in first.boundaries]
    on, back = ([summed(size_of(named[value.name]) for value in values) for values in each] for each in crossing)
    names = {call.position: call.fqn for call in reversed(calls) if call.fqn}
    layers = {call.position for call in repeated_layers(calls)}
    starts = [captured.starts[stage] for stage in whole.stage_of]
    metas = [node.meta for node in joint.graph.nodes if node.op != "output"]
    sharded_sizes = (size for meta in metas for size in growing_sizes(meta["val"], meta["sharded"]))
    return ModelCosts(
        rows=captured.rows,
        starts=whole.starts(captured.starts),
        names=tuple(whole.name(each, names.get(start, "")) for each, start in zip(whole.segments, starts, strict=True)),
        layers=tuple(segment for segment, start in enumerate(starts) if start in layers),
        variants=variants,
        forward=tuple(on[stage] for stage in whole.stage_of[:-1]),
        backward=tuple(back[stage] for stage in whole.stage_of[:-1]),
        parameters=tuple(_parameters(joint, first, whole, sharded)),
        buffers=tuple(_buffers(joint, first, whole)),
        derived=tuple(derived[stage] for stage in whole.stage_of),
        attentions=sum(whole.stage_of.count(node.meta["stage"]) for node in joint.computed() if _is_attention(node)),
        tensor_ranks=gcd(*sharded_sizes),
        expert_ranks=_expert_ranks(shapes, sharded),
    )


def segment_starts(joint: JointGraph, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The places where layers, and module calls outside of layers, start."""
    layers = repeated_layers(calls)
    names = {layer.fqn for layer in layers}
    at, starts = 0, {0}
    for call in calls:
        while at < len(layers) and layers[at].end <= call.position:
            at += 1
        within = at < len(layers) and layers[at].position <= call.position and call.end <= layers[at].end
        if not within or call.fqn in names:
            starts.add(call.position)
    return tuple(start for start in places(joint, calls) if start in starts)


def _expert_ranks(shapes: Mapping[str, tuple[int, ...]], sharded: ShardedParameters) -> int:
    """The most ranks that divide the experts of every layer. Raises `GraphPPError` if experts are modules of a list."""
    stacked = [shapes[fqn][0] for fqn in sharded.experts if len(shapes[fqn]) == _STACKED]
    if sharded.experts and not stacked:
        raise GraphPPError(
            f"expert_plan: {next(iter(sharded.experts))} has no dimension of experts: ep divides experts that are one "
            "parameter [experts, .., ..], as graphpp.experts.routed and transformers' grouped experts have them"
        )
    return gcd(*stacked)


def _is_attention(node: fx.Node) -> bool:
    return not node.meta["backward"] and any(kind == "context" for kind, *_ in node.meta.get("exchanges", ()))


def _staged(
    joint: JointGraph, calls: Sequence[ModuleCall], stages: int, recompute: str | None, device_type: str
) -> tuple[JointGraph, StagedGraphs]:
    """The segments' phase graphs, as `compile(memory=recompute)` would make them."""
    option = (read_recompute(recompute) if recompute is not None else None) or Recompute()
    region = policy.region_of(option, calls) if recompute is not None else None
    budget = policy.recompute_budget(option, region, device_type, None)
    options = LoweringOptions(
        split_backward=True, region_of=region, may_recompute=policy.may_recompute(option), recompute_budget=budget
    )
    return staged_graphs(joint, stages, options=options)


def _variant(joint: JointGraph, staged: StagedGraphs, stage_of: Sequence[int]) -> Variant:
    named = {node.name: node for node in joint.graph.nodes}
    kinds, number = dict[SegmentKind, int](), list[int]()
    for stage in range(len(staged.saved)):
        kind = _segment_kind([staged.graphs.get((phase, stage)) for phase in PHASES], staged, stage, named)
        number.append(kinds.setdefault(kind, len(kinds)))
    return Variant(tuple(kinds), tuple(number[stage] for stage in stage_of))


def _derived(joint: JointGraph, stages: int) -> list[Size]:
    """By stage, the bytes of parameters' values that are computed once per step by every backend, such as casts to float8.
    Notes these values in `meta["derived"]`."""
    marked = find_step_invariants(joint.copy(), cheap=False)
    for node, each in zip(joint.graph.nodes, marked.graph.nodes, strict=True):
        node.meta["derived"] = each.meta.get("step_invariant", False)
    hoisted = hoist_per_step(marked, cut_stages(marked, stages)).hoisted
    graphs = [hoisted[stage].graph if stage in hoisted else None for stage in range(stages)]
    return [summed(_signed(graph)) if graph is not None else () for graph in graphs]


def _signed(graph: fx.Graph) -> Iterator[Size]:
    for sign, node in live_values(graph):
        if counts_in_peak(node):
            yield tuple((*powers, sign * amount) for *powers, amount in size_of(node))  # type: ignore[misc]


def _segment_kind(
    graphs: Sequence[PhaseGraph | None], staged: StagedGraphs, stage: int, named: Mapping[str, fx.Node]
) -> SegmentKind:
    memory = staged.saved_memory, staged.kept_memory, staged.unread_memory
    saved, kept, unread = (summed(size_of(named[value.name]) for value in each[stage]) for each in memory)
    waiting = [unread if phase is program.Phase.INPUT_GRAD else () for phase in PHASES]
    return SegmentKind(
        operations=tuple(operations_of(each.graph) if each is not None else () for each in graphs),
        peaks=tuple(map(_peaks, graphs, waiting)),
        read=tuple(map(_read, graphs)),
        made=tuple(map(_gradients, graphs)),
        saved=saved,
        kept=kept,
        offloadable=tuple(_offloadable(*graphs)),
        operands=summed(_operands(stage, {value.name for value in staged.saved_memory[stage]}, named.values())),
    )


def _operands(stage: int, saved: Set[str], nodes: Iterable[fx.Node]) -> Iterator[Size]:
    """Sizes of the values that products read, once each, before they are viewed and cast, without `saved` ones."""
    found = set[fx.Node]()
    for node in nodes:
        own = node.meta.get("stage") == stage and not node.meta.get("backward") and node.meta.get("work")
        if own and packet_of(node) not in ATTENTION:
            for path in map(_viewed_and_cast, node.all_input_nodes):
                first = path[-1]
                if first not in found and any(first.meta.get("rows", ())) and saved.isdisjoint(each.name for each in path):
                    found.add(first)
                    yield size_of(first)


def _viewed_and_cast(operand: fx.Node) -> list[fx.Node]:
    """An operand of a product, and the values before it of which it is a view or a cast: to float8 after one scaling."""
    narrow = operand.meta["val"].dtype.itemsize == 1
    path, casts, scalings = [operand], _CASTS | (_TO_FLOAT8 if narrow else set()), 1
    while path[-1].op == "call_function":
        last = path[-1]
        scalings -= packet_of(last) in _SCALINGS
        if scalings < 0 or not (shares_memory(last) or packet_of(last) in casts):
            break
        path.append(max(last.all_input_nodes, key=lambda each: sum(term[3] for term in size_of(each))))
    return path


def _offloadable(forward: PhaseGraph | None, *backwards: PhaseGraph | None) -> Iterator[OffloadableSize]:
    """The saved values that may be offloaded if the neighbouring segments are on other ranks."""
    for value in offloadable(forward.graph, LocalNeighbours(below=False, above=False)) if forward is not None else ():
        role = program.Saved(value.meta.name)
        readers = tuple(Kind(each.phase.value) for each in backwards if each is not None and role in each.inputs)
        yield OffloadableSize(size_of(value.memory), readers, value.received, value.sent)


def _read(each: PhaseGraph | None) -> Size:
    """Bytes of the parameters that a phase reads. Scalars are left out: ranks do not shard them."""
    if each is None:
        return ()
    own = (node for node in each.graph.find_nodes(op="placeholder") if isinstance(node.meta["role"], program.Parameter))
    return summed(size_of(node) for node in own if node.meta["val"].dim() > 0)


def _gradients(each: PhaseGraph | None) -> Size:
    if each is None:
        return ()
    values = each.graph.output_node().args[0]
    pairs = zip(each.outputs, values, strict=True)  # type: ignore[arg-type]
    return summed(size_of(node) for role, node in pairs if isinstance(role, program.Gradient))


def _peaks(each: PhaseGraph | None, waiting: Size) -> tuple[Size, ...]:
    """The candidates for the peak of live memory: which is largest depends on rows and ranks. `waiting`: saved values that the
    phase does not read."""
    if each is None:
        return ()
    found: dict[Size, None] = {}
    total: dict[tuple[int, int, int], float] = {term[:3]: term[3] for term in waiting}
    rising = False
    for sign, node in live_values(each.graph):
        if not counts_in_peak(node):
            continue
        if sign < 0 and rising:
            found[_as_size(total)] = None
        rising = sign > 0
        for *powers, amount in size_of(node):
            key = tuple(powers)
            total[key] = total.get(key, 0.0) + sign * amount  # type: ignore[index,arg-type]
    found[_as_size(total)] = None
    return _largest(list(found))


def _as_size(total: Mapping[tuple[int, int, int], float]) -> Size:
    return tuple((*powers, amount) for powers, amount in sorted(total.items()) if amount)


def _largest(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that no other size exceeds in every term."""
    terms = [{term[:3]: term[3] for term in size} for size in sizes]
    order = sorted(range(len(sizes)), key=lambda at: -sum(terms[at].values()))
    chosen: list[int] = []
    for at in order:
        if not any(all(terms[other].get(key, 0) >= amount for key, amount in terms[at].items()) for other in chosen):
            chosen.append(at)
    return tuple(sizes[at] for at in chosen)


# ------------------------------------------------------------------------------------------- parameters


def _stages_of(
    staged: StagedGraphs, whole: WholeModel, roles: Callable[[PhaseGraph], Iterable[Any]], kind: Any
) -> dict[str, tuple[int, ...]]:
    """By FQN, the segments whose phase graphs contain a role of this kind."""
    found: dict[str, set[int]] = defaultdict(set)
    for (_, stage), each in staged.graphs.items():
        for role in roles(each):
            if isinstance(role, kind):
                found[role.fqn].add(stage)
    return {name: read for fqn, stages in found.items() for name, read in whole.readers(fqn, stages).items()}


def _parameters(
    joint: JointGraph, staged: StagedGraphs, whole: WholeModel, sharded: ShardedParameters
) -> Iterable[ParameterCosts]:
    readers = _stages_of(staged, whole, lambda each: each.inputs, program.Parameter)
    makers = _stages_of(staged, whole, lambda each: each.outputs, program.Gradient)
    for fqn, meta in joint.parameters.items():
        if fqn not in readers:
            continue
        made = makers.get(fqn, ())
        itemsize, dtype = meta.dtype.itemsize, str(meta.dtype).removeprefix("torch.")
        stages = tuple(sorted({*readers[fqn], *made})), made
        yield ParameterCosts(
            fqn, meta.nbytes // itemsize, dtype, itemsize, *stages, fqn in sharded.dims, fqn in sharded.experts
        )


def _buffers(joint: JointGraph, staged: StagedGraphs, whole: WholeModel) -> Iterable[tuple[int, tuple[int, ...]]]:
    readers = _stages_of(staged, whole, lambda each: each.inputs, program.Buffer)
    yield from ((meta.nbytes, readers[fqn]) for fqn, meta in joint.buffers.items() if fqn in readers)
