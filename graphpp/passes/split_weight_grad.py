"""Split the backward: I computes what the previous stage waits for, W the rest.

Contract
--------
Beside the backward B of every stage there are then two graphs that together are it:

    I   sends what B sends; a node stands in I only if a sent value needs it, and all such nodes do
    W   all other nodes; so it has the gradients of parameters, but for those that I makes on the way

Every node of B stands in exactly one of them, in its old order: nothing runs twice, and I then W has B's numbers to the
bit. What arrived for B arrives for I. I keeps for W, as saved values, what W reads of it and of what arrived; what the
forward saved stays where it is until the last of the two has read it. A stage that sends nothing (the first, those
behind frozen ones) has an empty I.

`rerun` names nodes that W may compute again where that keeps fewer bytes: then the values kept are a minimum cut, and
such a node may stand in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import networkx as nx
from torch import fx

from graphpp.passes.cut import Cut, Results, SlotGraph, slot_graph
from graphpp.passes.joint import JointGraph, is_check, is_tensor, tensor_meta
from graphpp.passes.traffic import B, Slot, bytes_of
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, Phase

I, W = Phase.INPUT_GRAD, Phase.WEIGHT_GRAD  # noqa: E741 - the letters of the papers
Rerun = Callable[[fx.Node], bool]


def never(node: fx.Node) -> bool:
    """Nothing runs twice."""
    return False


def split_weight_grad(joint: JointGraph, pieces: Cut, rerun: Rerun = never) -> Cut:
    """The pieces with I and W for every stage that has a backward; B stays, a schedule may use either."""
    named = {node.name: node for node in joint.graph.nodes}
    slots, kept = dict(pieces.slots), [0] * len(pieces.saved)
    for (phase, stage), whole in pieces.slots.items():
        if phase is B:
            first, second = _halves(whole, rerun)
            slots[I, stage], slots[W, stage] = first, second
            held = [role.name for role in second.inputs if isinstance(role, program.Saved)]
            kept[stage] = bytes_of(named[name] for name in held)
            _check(whole, first, second, rerun)
    return replace(pieces, slots=slots, kept_bytes=tuple(kept))


def _halves(whole: SlotGraph, rerun: Rerun) -> tuple[SlotGraph, SlotGraph]:
    results: Results = list(zip(whole.outputs, whole.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    early = _needed(whole, [node for role, node in results if isinstance(role, program.Sent)])
    sent = [(role, node) for role, node in results if isinstance(role, program.Sent) or node in early]
    late = [(role, node) for role, node in results if (role, node) not in sent]
    rest = {node for node in whole.graph.nodes if _runs(node) and node not in early}
    read = {source for node in rest for source in node.all_input_nodes} | {node for _, node in late}
    kept = _kept(read, early, rerun)
    again = _until(read & early, kept)
    handed = sorted((node for node in kept if not _stays(node)), key=_order(whole))
    saved: Results = [(program.Saved(node.name), node) for node in handed]
    first = _graph(whole, I, early, [*sent, *saved])
    return first, _graph(whole, W, rest | again, late, {node: program.Saved(node.name) for node in handed})


def _graph(
    whole: SlotGraph, phase: Phase, nodes: set[fx.Node], results: Results, handed: dict[fx.Node, InputRole] | None = None
) -> SlotGraph:
    """One half, with those inputs of the whole that it reads, and what the other half handed to it."""
    nodes = nodes | {source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    read = {source for node in nodes for source in node.all_input_nodes} | {node for _, node in results}
    given = {node: node.meta["role"] for node in whole.graph.find_nodes(op="placeholder") if node in read}
    inputs = given | (handed or {})
    slot: Slot = (phase, whole.stage)
    return slot_graph(slot, inputs, sorted(nodes, key=_order(whole)), results)


def _needed(whole: SlotGraph, sent: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `sent` is computed from; results of one operation, and checks of what is there, go with it."""
    needed: set[fx.Node] = set()
    pending = [node for node in sent if _runs(node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [source for source in node.all_input_nodes if _runs(source)]
            pending += [user for user in node.users if not is_tensor(node) and user.op != "output"]
    checks = (node for node in whole.graph.nodes if is_check(node))
    return needed | {node for node in checks if needed.intersection(node.all_input_nodes)}


def _runs(node: fx.Node) -> bool:
    """Whether a node computes; what an operation holds (a sub-graph) is at hand wherever it is named."""
    return node.op == "call_function"


def _stays(node: fx.Node) -> bool:
    """Whether W has a value at hand: an input of the stage, or what the forward saved; not what arrived for I."""
    return node.op == "placeholder" and not isinstance(node.meta["role"], program.Received)


def _order(whole: SlotGraph) -> Callable[[fx.Node], int]:
    return {node: index for index, node in enumerate(whole.graph.nodes)}.__getitem__


# ------------------------------------------------------------------------------------------ what I keeps for W


def _kept(read: set[fx.Node], early: set[fx.Node], rerun: Rerun) -> set[fx.Node]:
    """The values that W starts from: those it reads of I or, where some may run again, a cut of the fewest bytes."""
    handed = {node for node in read if node in early or node.op == "placeholder"}
    if not any(rerun(node) for node in handed & early):
        return handed
    network = nx.DiGraph()
    for node in _reachable(handed, early, rerun):
        network.add_edge((node, "in"), (node, "out"), capacity=_bytes(node))
        if node in handed:
            network.add_edge((node, "out"), "W")
        if _again(node, early, rerun):
            network.add_edges_from(((source, "out"), (node, "in")) for source in node.all_input_nodes)
        else:
            network.add_edge("I", (node, "in"))
    _, (near, _) = nx.minimum_cut(network, "I", "W")
    return {node for node, side in (near - {"I"}) if side == "in" and (node, "out") not in near}


def _reachable(handed: set[fx.Node], early: set[fx.Node], rerun: Rerun) -> set[fx.Node]:
    """What W reads, and what that could be computed from again."""
    found: set[fx.Node] = set()
    pending = list(handed)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes if _again(node, early, rerun) else ()
    return found


def _again(node: fx.Node, early: set[fx.Node], rerun: Rerun) -> bool:
    return node in early and rerun(node)


def _bytes(node: fx.Node) -> float:
    """What keeping a value costs; the results of an operation with several are kept one by one, never as a tuple."""
    if node.op == "placeholder" and not isinstance(node.meta["role"], program.Received | program.Saved):
        return 0
    return tensor_meta(node).nbytes if is_tensor(node) else float("inf")


def _until(wanted: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """What is computed again, from the values kept, to have those that are wanted."""
    again: set[fx.Node] = set()
    pending = list(wanted - kept)
    while pending:
        node = pending.pop()
        if node not in again:
            again.add(node)
            pending += [source for source in node.all_input_nodes if source not in kept and source.op != "placeholder"]
    return again


def _check(whole: SlotGraph, first: SlotGraph, second: SlotGraph, rerun: Rerun) -> None:
    """Every node of the backward stands in one half; every result comes out of one."""
    runs = Counter(node.name for half in (first, second) for node in half.graph.nodes if _runs(node))
    again = {node.name: rerun(node) for node in whole.graph.nodes if _runs(node)}
    assert runs.keys() == again.keys(), f"lost between I and W: {again.keys() - runs.keys()}"
    assert all(again[name] for name, count in runs.items() if count > 1), "a node runs twice"
    results = [role for half in (first, second) for role in half.outputs if not isinstance(role, program.Saved)]
    assert sorted(map(repr, results)) == sorted(map(repr, whole.outputs)), "a result of the backward is lost or doubled"
