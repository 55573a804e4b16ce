"""Split the backward: I computes the input gradients, for which the previous stage waits; W computes the weight gradients.

Contract: the backward B of every stage stays, and two graphs are added that together compute the same results, bit for bit:

    I   sends the values that B sends; it has all nodes that a sent value depends on, and no other backward node
    W   has all other nodes, and so the gradients of parameters, except gradients that I computes on the way

Every node of B is in exactly one half, in its old order. A recomputed forward value that only W needs is in the half that
leaves fewer bytes alive between the halves. `may_recompute` names nodes of I that W may also run where this keeps fewer bytes.

I receives the values that B receives. I saves for W a minimum cut of the values that W reads of I's nodes and of the received
values. A value that the forward saved stays alive until the last half has read it: in I such a placeholder has `meta["kept"]`.
A stage that sends nothing (the first stage, or one after frozen stages) has an empty I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, is_check, is_tensor, reached, results_of, tensor_meta
from graphpp.passes.graph.stage_graphs import B, GraphResults, PhaseGraph, StagedGraphs, phase_graph
from graphpp.passes.recompute.backward_needs import MayRecompute
from graphpp.passes.stage.route_values import memory_of
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, OutputRole, Phase, TensorMeta

if TYPE_CHECKING:
    import networkx as nx

I, W = Phase.INPUT_GRAD, Phase.WEIGHT_GRAD  # noqa: E741 - the letters of the papers
Memory = tuple[TensorMeta, ...]


def never(node: fx.Node) -> bool:
    return False


def split_weight_grad(joint: JointGraph, staged: StagedGraphs, may_recompute: MayRecompute = never) -> StagedGraphs:
    """Add I and W for every stage with a backward; B stays, so that a schedule may use either. `staged` stays unchanged."""
    named = {node.name: node for node in joint.graph.nodes}
    graphs = dict(staged.graphs)
    kept: list[Memory] = [()] * len(staged.saved)
    unread = kept.copy()
    for (phase, stage), whole in staged.graphs.items():
        if phase is B:
            graphs[I, stage], graphs[W, stage] = _halves(whole, may_recompute)
            kept[stage], unread[stage] = memory_between(graphs[I, stage], graphs[W, stage], named)
    return replace(staged, graphs=graphs, kept_memory=tuple(kept), unread_memory=tuple(unread))


def memory_between(first: PhaseGraph, second: PhaseGraph, named: Mapping[str, fx.Node]) -> tuple[Memory, Memory]:
    """The values whose memory is alive between two halves, and those of them that the first half neither reads nor makes."""
    kept = memory_of(named[name] for name in _names(second.inputs))
    in_first = memory_of(named[name] for name in _names((*first.inputs, *first.outputs)))
    return kept, tuple(memory for memory in kept if memory not in in_first)


def _names(roles: Iterable[InputRole | OutputRole]) -> list[str]:
    return [role.name for role in roles if isinstance(role, program.Saved)]


def _halves(whole: PhaseGraph, may_recompute: MayRecompute) -> tuple[PhaseGraph, PhaseGraph]:
    results = results_of(whole.graph)
    in_i = _needed(whole, [node for role, node in results if isinstance(role, program.Sent)])
    of_i = [(role, node) for role, node in results if isinstance(role, program.Sent) or node in in_i]
    of_w = [(role, node) for role, node in results if (role, node) not in of_i]
    rest = {node for node in whole.graph.nodes if runs(node) and node not in in_i}
    seam = Seam(whole, in_i, {node for _, node in of_w}, may_recompute)
    kept, moved = seam.cut(_order(whole))
    again = until((seam.read(rest - moved) & in_i), kept)
    handed = [node for node in kept if not _stays(node)]
    return checked_halves(whole, Half(I, in_i | moved, of_i), Half(W, (rest - moved) | again, of_w), handed, may_recompute)


class Half(NamedTuple):
    phase: Phase
    nodes: set[fx.Node]
    results: GraphResults


def checked_halves(
    whole: PhaseGraph, one: Half, two: Half, handed: Iterable[fx.Node], may_recompute: MayRecompute
) -> tuple[PhaseGraph, PhaseGraph]:
    """The graphs of two halves, the first of which saves the values `handed` for the second."""
    ordered = sorted(handed, key=_order(whole))
    saved: GraphResults = [(program.Saved(node.name), node) for node in ordered]
    first = _half(whole, one.phase, one.nodes, [*one.results, *saved])
    second = _half(whole, two.phase, two.nodes, two.results, {node: program.Saved(node.name) for node in ordered})
    for node in first.graph.find_nodes(op="placeholder"):
        node.meta["kept"] = isinstance(node.meta["role"], program.Saved) and node.meta["role"] in second.inputs
    _check(whole, first, second, may_recompute)
    return first, second


def _half(
    whole: PhaseGraph,
    phase: Phase,
    nodes: set[fx.Node],
    results: GraphResults,
    handed: dict[fx.Node, InputRole] | None = None,
) -> PhaseGraph:
    """One half; its inputs are the inputs of B that it reads, and the values that the other half saved for it."""
    nodes = nodes | {source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    read = {source for node in nodes for source in node.all_input_nodes} | {node for _, node in results}
    own = {node: node.meta["role"] for node in whole.graph.find_nodes(op="placeholder") if node in read}
    return phase_graph((phase, whole.stage), own | (handed or {}), sorted(nodes, key=_order(whole)), results)


def _needed(whole: PhaseGraph, sent: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that the `sent` values depend on, with the items of their tuples and the checks of their results."""

    def onward(node: fx.Node) -> list[fx.Node]:
        items = [user for user in node.users if not is_tensor(node) and user.op != "output"]
        return [*filter(runs, node.all_input_nodes), *items]

    needed = reached(filter(runs, sent), onward)
    checks = (node for node in whole.graph.nodes if is_check(node))
    return needed | {node for node in checks if needed.intersection(node.all_input_nodes)}


def runs(node: fx.Node) -> bool:
    return node.op == "call_function"


def _stays(node: fx.Node) -> bool:
    """Whether W has a value without I: an input of the stage, or a value that the forward saved; not a received value."""
    return node.op == "placeholder" and not isinstance(node.meta["role"], program.Received)


def _order(whole: PhaseGraph) -> Callable[[fx.Node], int]:
    return {node: index for index, node in enumerate(whole.graph.nodes)}.__getitem__


class Seam:
    """The cut between I and W: nodes `in_i` run in I, the others in W; W returns the results `of_w`.

    `_movable`: nodes of W that may run in I instead: recomputed forward values, and values without a stage. The same cut is
    between R and B (`split_recompute.py`), where nothing is movable.
    """

    def __init__(
        self, whole: PhaseGraph, in_i: set[fx.Node], of_w: set[fx.Node], may_recompute: MayRecompute, *, moves: bool = True
    ) -> None:
        self._in_i, self._of_w, self._may_recompute = in_i, of_w, may_recompute
        self._rest = [node for node in whole.graph.nodes if runs(node) and node not in in_i]
        self._movable: set[fx.Node] = set()
        for node in self._rest if in_i and moves else ():
            of_forward = node.meta.get("recomputed") or node.meta["stage"] is None
            if of_forward and node not in of_w and all(map(self._is_there, node.all_input_nodes)):
                self._movable.add(node)

    def _is_there(self, node: fx.Node) -> bool:
        return not runs(node) or node in self._in_i or node in self._movable

    def read(self, second: Iterable[fx.Node]) -> set[fx.Node]:
        return {source for node in second for source in node.all_input_nodes} | self._of_w

    def cut(self, order: Callable[[fx.Node], int]) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that W starts from (a cut with the fewest bytes), and the nodes of W that move to I."""
        read = self.read(node for node in self._rest if node not in self._movable)
        handed = {node for node in self.read(self._rest) if node in self._in_i or node.op == "placeholder"}
        if not self._movable and not any(map(self._may_recompute, handed & self._in_i)):
            return handed, set()
        import networkx as nx  # 0.25 s that `import graphpp` need not take

        reached = sorted(self._reached(read), key=order)
        _, (near, _) = nx.minimum_cut(self._network(reached, read), "I", "W")
        kept = {node for node in reached if (node, "in") in near and (node, "out") not in near}
        return kept, {node for node in reached if node in self._movable and (node, "in") in near}

    def _reached(self, read: set[fx.Node]) -> set[fx.Node]:
        """The values that W reads, and the values from which W could compute them."""

        def sources(node: fx.Node) -> list[fx.Node]:
            return node.all_input_nodes if self._may_run_in_w(node) else []

        return {node for node in reached(filter(self._is_there, read), sources) if node.op != "get_attr"}

    def _may_run_in_w(self, node: fx.Node) -> bool:
        return node in self._movable or (node in self._in_i and self._may_recompute(node))

    def _network(self, reached: list[fx.Node], read: set[fx.Node]) -> nx.DiGraph:
        """The network. Of cuts of equal bytes, the one that moves the fewest nodes to I wins, since a stage waits for I."""
        import networkx as nx

        network, weight = nx.DiGraph(), len(reached) + 1
        for node in reached:
            nbytes = _bytes(node)
            network.add_edge((node, "in"), (node, "out"), **({} if nbytes is None else {"capacity": nbytes * weight}))
            if node in read:
                network.add_edge((node, "out"), "W")
            sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
            if self._may_run_in_w(node):
                network.add_edges_from(((source, "out"), (node, "in")) for source in sources)
            else:
                network.add_edge("I", (node, "in"))
            if node in self._movable:
                network.add_edges_from(((node, "in"), (source, "in")) for source in sources)
                network.add_edge((node, "in"), "W", capacity=1)
        return network


def _bytes(node: fx.Node) -> int | None:
    """The bytes of keeping a value; None for a tuple, whose items are kept separately."""
    if node.op == "placeholder" and not isinstance(node.meta["role"], program.Received | program.Saved):
        return 0
    return tensor_meta(node).nbytes if is_tensor(node) else None


def until(wanted: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    def missing(node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if source not in kept and source.op != "placeholder"]

    return reached(wanted - kept, missing)


def _check(whole: PhaseGraph, first: PhaseGraph, second: PhaseGraph, may_recompute: MayRecompute) -> None:
    """Raise `AssertionError` unless every node of B is in a half, and every result comes from exactly one half."""
    count = Counter(node.name for half in (first, second) for node in half.graph.nodes if runs(node))
    again = {node.name: may_recompute(node) for node in whole.graph.nodes if runs(node)}
    assert count.keys() == again.keys(), f"lost between two halves: {again.keys() - count.keys()}"
    assert all(again[name] for name, times in count.items() if times > 1), "a node runs twice"
    results = [role for half in (first, second) for role in half.outputs if not isinstance(role, program.Saved)]
    assert sorted(map(repr, results)) == sorted(map(repr, whole.outputs)), "a result of the backward is lost or doubled"
