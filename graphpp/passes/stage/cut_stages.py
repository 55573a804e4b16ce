"""Cut the joint graph, whose nodes have stages, into one graph per phase and stage; route the values between them.

Contract: one microbatch runs the phases F0, F1 .. F(S-1), B(S-1) .. B0. A value that one phase computes and a later phase reads
is sent only between neighbouring stages:

    Fs -> Ft (t > s)    sent forward over s|s+1 .. t-1|t; the stages between relay it
    Fs -> Bt (t >= s)   sent forward to t, saved there for the backward
    Fs -> Bt (t < s)    saved at s, sent backward to t
    Bs -> Bt (t < s)    sent backward

Afterwards every node with a stage, and every result of the joint graph, is in exactly one phase graph, and a value crosses a
boundary at most once per direction. Parameters, buffers, inputs, and values without a stage are never sent: each phase reads or
computes them itself. To save time, the forward saves a value without a stage that both phases of its stage would compute,
unless it is free to recompute.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import fx

from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.joint_graph import JointGraph, reached
from graphpp.passes.graph.stage_graphs import B, F, GraphResults, PhaseGraph, PhaseKey, StagedGraphs, phase_graph
from graphpp.passes.stage.route_values import Traffic, boundaries, home_phase, saved_values
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, OutputRole


def cut_stages(joint: JointGraph, stages: int) -> StagedGraphs:
    """Cut a joint graph into phase graphs of `stages` stages; nodes need `meta["stage"]`. `joint` stays unchanged."""
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    keys = [(F, stage) for stage in range(stages)]
    if joint.training:
        keys += [(B, stage) for stage in reversed(range(stages))]
    results: dict[PhaseKey, GraphResults] = defaultdict(list)
    for role, node in joint.outputs():
        results[_result_phase(joint, role, node, stages)].append((role, node))
    own: dict[PhaseKey | None, set[fx.Node]] = defaultdict(set)
    for node in joint.computed():
        own[home_phase(node)].add(node)
    members = {key: _members(own[key], results[key]) for key in keys}
    traffic = Traffic()
    for key in keys:
        _route(members, key, results[key], traffic)
    graphs = {key: _phase_graph(key, order, members[key], results[key], traffic) for key in keys}
    staged = StagedGraphs(graphs, boundaries(traffic, order, joint, stages), *saved_values(traffic, order, stages))
    _check(joint, staged)
    return staged


def _result_phase(joint: JointGraph, role: OutputRole, node: fx.Node, stages: int) -> PhaseKey:
    """The phase that returns a result: for gradients and updates that of the stage that computes it, else the last forward.

    A gradient or update without a stage comes from the first stage that reads its parameter or buffer.
    """
    if not isinstance(role, program.Gradient | program.BufferUpdate):
        return (F, stages - 1)
    phase = B if isinstance(role, program.Gradient) else F
    if node.meta["stage"] is not None:
        return (phase, node.meta["stage"])
    owned: InputRole = program.Buffer(role.fqn) if isinstance(role, program.BufferUpdate) else program.Parameter(role.fqn)
    readers = [user.meta["stage"] for user in joint.inputs()[owned].users if user.meta.get("stage") is not None]
    return (phase, min(readers, default=0))


def _members(own: set[fx.Node], results: GraphResults) -> set[fx.Node]:
    """The nodes that a phase computes: its own, and the nodes without a stage that it reads, including placeholders."""
    read = [source for node in own for source in node.all_input_nodes] + [node for _, node in results]
    return own | reached(filter(_is_at_hand, read), lambda node: filter(_is_at_hand, node.all_input_nodes))


def _is_at_hand(node: fx.Node) -> bool:
    return home_phase(node) is None


def _route(members: dict[PhaseKey, set[fx.Node]], key: PhaseKey, results: GraphResults, traffic: Traffic) -> None:
    """Send or save the values that a phase reads from other phases, and values without a stage that a backward would repeat."""
    phase, stage = key
    if phase is B:
        for node in _saved_by_forward(members[key], members[F, stage], results):
            traffic.saved[stage].add(node)
        members[key] = _still_needed(members[key], key, traffic.saved[stage], results)
    read = {source for node in members[key] for source in node.all_input_nodes} | {node for _, node in results}
    for value in read:
        source = home_phase(value)
        if source is not None and source != key:
            traffic.carry(value, source, key)


def _saved_by_forward(members: set[fx.Node], forward: set[fx.Node], results: GraphResults) -> list[fx.Node]:
    """The values without a stage that a stage's forward computes and its backward reads, except free ones."""
    read = {source for node in members if home_phase(node) is not None for source in node.all_input_nodes}
    read |= {node for _, node in results}
    return [node for node in read if home_phase(node) is None and node in forward and not _free(node)]


def _free(node: fx.Node) -> bool:
    """Whether a phase has a value without computation: a placeholder, a view of one, or a step-invariant value."""
    if node.op == "placeholder" or node.meta.get("step_invariant"):
        return True
    return is_view(node) and all(_free(source) for source in node.all_input_nodes)


def _still_needed(members: set[fx.Node], key: PhaseKey, saved: set[fx.Node], results: GraphResults) -> set[fx.Node]:
    own, computed = {node for node in members if home_phase(node) == key}, members - saved
    start = own | computed.intersection(node for _, node in results)
    return reached(start, lambda node: computed.intersection(node.all_input_nodes))


def _phase_graph(
    key: PhaseKey, order: dict[fx.Node, int], members: set[fx.Node], results: GraphResults, traffic: Traffic
) -> PhaseGraph:
    arriving = traffic.arriving(key)
    placeholders = [node for node in members if node.op == "placeholder"]
    inputs = {node: arriving[node] for node in sorted(arriving, key=order.__getitem__)}
    inputs |= {node: node.meta["role"] for node in sorted(placeholders, key=order.__getitem__)}
    outputs = list(results)
    for kind, values in traffic.leaving(key):
        outputs += [(kind(node.name), node) for node in sorted(values, key=order.__getitem__)]
    return phase_graph(key, inputs, sorted(members - inputs.keys(), key=order.__getitem__), outputs)


def _check(joint: JointGraph, staged: StagedGraphs) -> None:
    computed = (node for each in staged.graphs.values() for node in each.graph.nodes if node.op != "placeholder")
    copies = Counter(node.name for node in computed)
    for node in joint.computed():
        assert node.meta["stage"] is None or copies[node.name] == 1, f"{node} stands in {copies[node.name]} phase graphs"
    outputs = (role for each in staged.graphs.values() for role in each.outputs)
    results = [repr(role) for role in outputs if not isinstance(role, program.Sent | program.Saved)]
    expected = sorted(repr(role) for role, _ in joint.outputs())
    assert sorted(results) == expected, "a result of the joint graph is lost or doubled"
