"""Cut stages: the joint graph with stages -> one graph per slot, and what travels between slots.

Contract
--------
One microbatch visits the slots F0, F1 .. F(S-1), B(S-1) .. B0. A value made in one slot and read in a later one travels
only along neighbours:

    Fs -> Ft (t > s)    sent forward over s|s+1 .. t-1|t; stages between relay it
    Fs -> Bt (t >= s)   sent forward to t, saved there for the backward
    Fs -> Bt (t < s)    saved at s, sent backward to t
    Bs -> Bt (t < s)    sent backward

so any assignment in which stages do not fall in the forward and do not rise in the backward is run correctly.
Afterwards every node with a stage stands in exactly one slot, every result of the joint graph in exactly one, and every
value crosses a boundary at most once per direction. Parameters, buffers, inputs and what `assign_stages` left without a stage
never travel: a slot reads or computes them itself (a replicated value that the same stage's forward computed is saved).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import B, F, GraphResults, PhaseGraph, PhaseKey, StagedGraphs, phase_graph
from graphpp.passes.stage.route_values import Traffic, boundaries, home_phase, saved_values
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, OutputRole


def cut_stages(joint: JointGraph, stages: int) -> StagedGraphs:
    """Cut a joint graph whose nodes have stages into `stages` stages (see the head of the file)."""
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    slots = [(F, stage) for stage in range(stages)]
    if joint.training:
        slots += [(B, stage) for stage in reversed(range(stages))]
    results = _results_by_slot(joint, stages)
    own = _own(joint)
    members = {slot: _members(own[slot], results[slot]) for slot in slots}
    traffic = Traffic()
    for slot in slots:
        _route(members, slot, results[slot], traffic)
    graphs = {slot: _slot_graph(slot, order, members[slot], results[slot], traffic) for slot in slots}
    result = StagedGraphs(graphs, boundaries(traffic, order, joint, stages), *saved_values(traffic, order, stages))
    _check(joint, result)
    return result


def _results_by_slot(joint: JointGraph, stages: int) -> dict[PhaseKey, GraphResults]:
    results: dict[PhaseKey, GraphResults] = defaultdict(list)
    for role, node in joint.outputs():
        results[_result_slot(joint, role, node, stages)].append((role, node))
    return results


def _result_slot(joint: JointGraph, role: OutputRole, node: fx.Node, stages: int) -> PhaseKey:
    """A gradient or an update belongs to the stage that computes it; loss and output to the last stage."""
    if not isinstance(role, program.Gradient | program.BufferUpdate):
        return (F, stages - 1)
    phase = B if isinstance(role, program.Gradient) else F
    if node.meta["stage"] is not None:
        return (phase, node.meta["stage"])
    owned: InputRole = (
        program.Buffer(role.fqn) if isinstance(role, program.BufferUpdate) else program.Parameter(role.fqn)
    )
    readers = [user.meta["stage"] for user in joint.inputs()[owned].users if user.meta.get("stage") is not None]
    return (phase, min(readers, default=0))


def _own(joint: JointGraph) -> dict[PhaseKey, set[fx.Node]]:
    """The nodes that belong to each slot."""
    own: dict[PhaseKey, set[fx.Node]] = defaultdict(set)
    for node in joint.computed():
        slot = home_phase(node)
        if slot is not None:
            own[slot].add(node)
    return own


def _members(own: set[fx.Node], results: GraphResults) -> set[fx.Node]:
    """The nodes a slot computes: its own, and what they read that every slot has at hand."""
    members = set(own)
    pending = [source for node in members for source in node.all_input_nodes] + [node for _, node in results]
    while pending:
        node = pending.pop()
        if home_phase(node) is None and node not in members:
            members.add(node)
            pending += node.all_input_nodes
    return members


def _route(members: dict[PhaseKey, set[fx.Node]], slot: PhaseKey, results: GraphResults, traffic: Traffic) -> None:
    """Send or save what a slot reads from others; values at hand that its own forward computed are saved, not made again."""
    phase, stage = slot
    if phase is B:
        for node in _kept_from_forward(members[slot], members[F, stage], results):
            traffic.saved[stage].add(node)
        members[slot] = _still_needed(members[slot], slot, traffic.saved[stage], results)
    wanted = {source for node in members[slot] for source in node.all_input_nodes} | {node for _, node in results}
    for value in wanted:
        source = home_phase(value)
        if source is not None and source != slot:
            traffic.carry(value, source, slot)


def _kept_from_forward(members: set[fx.Node], forward: set[fx.Node], results: GraphResults) -> list[fx.Node]:
    """Replicated values (no views, no inputs) that this stage's forward also computes and a node of the backward reads."""
    read = {source for node in members if home_phase(node) is not None for source in node.all_input_nodes}
    read |= {node for _, node in results}
    return [node for node in read if home_phase(node) is None and node in forward and not _free(node)]


def _free(node: fx.Node) -> bool:
    """A placeholder, or a view of one: costs nothing to make again; or what is made once per step anyway."""
    if node.op == "placeholder" or node.meta.get("step_invariant"):
        return True
    return is_view(node) and all(_free(source) for source in node.all_input_nodes)


def _still_needed(members: set[fx.Node], slot: PhaseKey, saved: set[fx.Node], results: GraphResults) -> set[fx.Node]:
    """The members without what only led to values that are now saved."""
    own = {node for node in members if home_phase(node) == slot}
    pending = [source for node in own for source in node.all_input_nodes] + [node for _, node in results]
    kept = set(own)
    while pending:
        node = pending.pop()
        if node in members and node not in saved and node not in kept:
            kept.add(node)
            pending += node.all_input_nodes
    return kept


def _slot_graph(
    slot: PhaseKey, order: dict[fx.Node, int], members: set[fx.Node], results: GraphResults, traffic: Traffic
) -> PhaseGraph:
    arriving = traffic.arriving(slot)
    given = [node for node in members if node.op == "placeholder"]
    inputs = {node: arriving[node] for node in sorted(arriving, key=order.__getitem__)}
    inputs |= {node: node.meta["role"] for node in sorted(given, key=order.__getitem__)}
    outputs = list(results)
    for kind, values in traffic.leaving(slot):
        outputs += [(kind(node.name), node) for node in sorted(values, key=order.__getitem__)]
    return phase_graph(slot, inputs, sorted(members - inputs.keys(), key=order.__getitem__), outputs)


def _check(joint: JointGraph, result: StagedGraphs) -> None:
    """Every node with a stage stands in exactly one slot, every result of the joint graph in exactly one."""
    copies: dict[str, int] = defaultdict(int)
    for slot in result.graphs.values():
        for node in slot.graph.nodes:
            if node.op not in ("placeholder", "output") and node.meta["stage"] is not None:
                copies[node.name] += 1
    for node in joint.computed():
        assert node.meta["stage"] is None or copies[node.name] == 1, f"{node} stands in {copies[node.name]} slots"
    expected = sorted(map(repr, (role for role, _ in joint.outputs())))
    assert sorted(map(repr, _results(result))) == expected, "a result of the joint graph is lost or doubled"


def _results(result: StagedGraphs) -> Iterator[OutputRole]:
    for slot in result.graphs.values():
        yield from (role for role in slot.outputs if not isinstance(role, program.Sent | program.Saved))
