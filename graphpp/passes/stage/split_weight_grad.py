"""Split the backward: I computes what the previous stage waits for, W the rest.

Contract
--------
Beside the backward B of every stage there are then two graphs that together are it:

    I   sends what B sends; it has all nodes that a sent value needs, and no other node of the backward itself
    W   all other nodes; so it has the gradients of parameters, but for those that I makes on the way

A value of the forward that is computed again for W alone (see `rematerialize.py`) is computed in that half which leaves fewer
bytes waiting between them: in W, or already in I where all that it is computed from would have to wait else.

Every node of B stands in exactly one of them, in its old order: nothing runs twice, and I then W has B's numbers to the
bit. What arrived for B arrives for I. I keeps for W, as saved values, what W reads of it and of what arrived; what the
forward saved stays where it is until the last of the two has read it. A stage that sends nothing (the first, those
behind frozen ones) has an empty I.

`rerun` names nodes of I that W may compute again where that keeps fewer bytes; such a node may stand in both. The values kept
are a minimum cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, is_check, is_tensor, tensor_meta
from graphpp.passes.graph.stage_graphs import B, GraphResults, PhaseGraph, PhaseKey, StagedGraphs, phase_graph
from graphpp.passes.recompute.backward_needs import MayRecompute
from graphpp.passes.stage.route_values import memory_bytes
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, Phase

if TYPE_CHECKING:
    import networkx as nx

I, W = Phase.INPUT_GRAD, Phase.WEIGHT_GRAD  # noqa: E741 - the letters of the papers


def never(node: fx.Node) -> bool:
    """Nothing runs twice."""
    return False


def split_weight_grad(joint: JointGraph, staged: StagedGraphs, rerun: MayRecompute = never) -> StagedGraphs:
    """The staged with I and W for every stage that has a backward; B stays, a schedule may use either."""
    named = {node.name: node for node in joint.graph.nodes}
    slots, kept = dict(staged.graphs), [0] * len(staged.saved)
    for (phase, stage), whole in staged.graphs.items():
        if phase is B:
            first, second = _halves(whole, rerun)
            slots[I, stage], slots[W, stage] = first, second
            held = [role.name for role in second.inputs if isinstance(role, program.Saved)]
            kept[stage] = memory_bytes(named[name] for name in held)
            _check(whole, first, second, rerun)
    return replace(staged, graphs=slots, kept_bytes=tuple(kept))


def _halves(whole: PhaseGraph, rerun: MayRecompute) -> tuple[PhaseGraph, PhaseGraph]:
    results: GraphResults = list(zip(whole.outputs, whole.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    early = _needed(whole, [node for role, node in results if isinstance(role, program.Sent)])
    sent = [(role, node) for role, node in results if isinstance(role, program.Sent) or node in early]
    late = [(role, node) for role, node in results if (role, node) not in sent]
    rest = {node for node in whole.graph.nodes if _runs(node) and node not in early}
    seam = _Seam(whole, early, {node for _, node in late}, rerun)
    kept, lifted = seam.cut(_order(whole))
    again = _until((seam.read(rest - lifted) & early), kept)
    handed = sorted((node for node in kept if not _stays(node)), key=_order(whole))
    saved: GraphResults = [(program.Saved(node.name), node) for node in handed]
    first = _graph(whole, I, early | lifted, [*sent, *saved])
    second = (rest - lifted) | again
    return first, _graph(whole, W, second, late, {node: program.Saved(node.name) for node in handed})


def _graph(
    whole: PhaseGraph, phase: Phase, nodes: set[fx.Node], results: GraphResults, handed: dict[fx.Node, InputRole] | None = None
) -> PhaseGraph:
    """One half, with those inputs of the whole that it reads, and what the other half handed to it."""
    nodes = nodes | {source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    read = {source for node in nodes for source in node.all_input_nodes} | {node for _, node in results}
    given = {node: node.meta["role"] for node in whole.graph.find_nodes(op="placeholder") if node in read}
    inputs = given | (handed or {})
    slot: PhaseKey = (phase, whole.stage)
    return phase_graph(slot, inputs, sorted(nodes, key=_order(whole)), results)


def _needed(whole: PhaseGraph, sent: Iterable[fx.Node]) -> set[fx.Node]:
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


def _order(whole: PhaseGraph) -> Callable[[fx.Node], int]:
    return {node: index for index, node in enumerate(whole.graph.nodes)}.__getitem__


# ------------------------------------------------------------------------------------------ what I keeps for W


class _Seam:
    """Between I and W: `early` runs in I, the rest in W, which makes `late` results."""

    def __init__(self, whole: PhaseGraph, early: set[fx.Node], late: set[fx.Node], rerun: MayRecompute) -> None:
        self._early, self._late, self._rerun = early, late, rerun
        self._rest = [node for node in whole.graph.nodes if _runs(node) and node not in early]
        self._movable: set[fx.Node] = set()
        for node in self._rest if early else ():
            of_forward = node.meta.get("recomputed") or node.meta["stage"] is None
            if of_forward and node not in late and all(map(self._is_there, node.all_input_nodes)):
                self._movable.add(node)

    def _is_there(self, node: fx.Node) -> bool:
        """Whether I has a value, or may have it."""
        return not _runs(node) or node in self._early or node in self._movable

    def read(self, second: Iterable[fx.Node]) -> set[fx.Node]:
        """What a W of these nodes reads."""
        return {source for node in second for source in node.all_input_nodes} | self._late

    def cut(self, order: Callable[[fx.Node], int]) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that W starts from, a cut of the fewest bytes; and what of W's runs in I already."""
        read = self.read(node for node in self._rest if node not in self._movable)
        handed = {node for node in self.read(self._rest) if node in self._early or node.op == "placeholder"}
        if not self._movable and not any(map(self._rerun, handed & self._early)):
            return handed, set()
        import networkx as nx  # 0.25 s that `import graphpp` need not take

        reached = sorted(self._reached(read), key=order)
        _, (near, _) = nx.minimum_cut(self._network(reached, read), "I", "W")
        kept = {node for node in reached if (node, "in") in near and (node, "out") not in near}
        return kept, {node for node in reached if node in self._movable and (node, "in") in near}

    def _reached(self, read: set[fx.Node]) -> set[fx.Node]:
        """What W reads, and what that could be computed from in W."""
        found: set[fx.Node] = set()
        pending = [node for node in read if self._is_there(node)]
        while pending:
            node = pending.pop()
            if node not in found and node.op != "get_attr":
                found.add(node)
                pending += node.all_input_nodes if self._in_w(node) else ()
        return found

    def _in_w(self, node: fx.Node) -> bool:
        """Whether W may compute a value, alone or once more."""
        return node in self._movable or (node in self._early and self._rerun(node))

    def _network(self, reached: list[fx.Node], read: set[fx.Node]) -> nx.DiGraph:
        """Bytes weigh more than anything; of equal cuts the one with fewer nodes moved to I, on which others wait."""
        import networkx as nx

        network, weight = nx.DiGraph(), len(reached) + 1
        for node in reached:
            nbytes = _bytes(node)
            network.add_edge((node, "in"), (node, "out"), **({} if nbytes is None else {"capacity": nbytes * weight}))
            if node in read:
                network.add_edge((node, "out"), "W")
            sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
            if self._in_w(node):
                network.add_edges_from(((source, "out"), (node, "in")) for source in sources)
            else:
                network.add_edge("I", (node, "in"))
            if node in self._movable:
                network.add_edges_from(((node, "in"), (source, "in")) for source in sources)
                network.add_edge((node, "in"), "W", capacity=1)
        return network


def _bytes(node: fx.Node) -> int | None:
    """What keeping a value costs; the results of an operation with several are kept one by one, never as a tuple."""
    if node.op == "placeholder" and not isinstance(node.meta["role"], program.Received | program.Saved):
        return 0
    return tensor_meta(node).nbytes if is_tensor(node) else None


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


def _check(whole: PhaseGraph, first: PhaseGraph, second: PhaseGraph, rerun: MayRecompute) -> None:
    """Every node of the backward stands in one half; every result comes out of one."""
    runs = Counter(node.name for half in (first, second) for node in half.graph.nodes if _runs(node))
    again = {node.name: rerun(node) for node in whole.graph.nodes if _runs(node)}
    assert runs.keys() == again.keys(), f"lost between I and W: {again.keys() - runs.keys()}"
    assert all(again[name] for name, count in runs.items() if count > 1), "a node runs twice"
    results = [role for half in (first, second) for role in half.outputs if not isinstance(role, program.Saved)]
    assert sorted(map(repr, results)) == sorted(map(repr, whole.outputs)), "a result of the backward is lost or doubled"
