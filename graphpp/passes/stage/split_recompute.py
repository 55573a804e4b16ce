"""Split recomputation from the backward: R recomputes forward values, and B reads them.

Contract: the graph B of every stage is replaced, and a graph R is added; R and B together compute the results of the old B, bit
for bit. R has recomputed forward values (`meta["recomputed"]`) and the values without a stage from which they are computed; it
reads no value from another stage, and all results are B's. R saves for B a minimum cut of the values that B reads of R's nodes,
where B may repeat cheap operations: B reads about the values that a backward without recomputation reads. A value that the
forward saved stays alive until the last of R and B has read it. A stage that recomputes nothing has an empty R.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, reached, results_of
from graphpp.passes.graph.op_costs import is_cheap
from graphpp.passes.graph.stage_graphs import B, PhaseGraph, StagedGraphs
from graphpp.passes.stage.split_weight_grad import Half, Memory, Seam, checked_halves, memory_between, runs, until
from graphpp.runtime import program
from graphpp.runtime.program import Phase

R = Phase.RECOMPUTE


def split_recompute(joint: JointGraph, staged: StagedGraphs) -> StagedGraphs:
    """Add R for every stage with a backward, whose B then reads the values of R. `staged` stays unchanged."""
    named = {node.name: node for node in joint.graph.nodes}
    graphs = dict(staged.graphs)
    after: list[Memory] = [()] * len(staged.saved)
    waiting = after.copy()
    for (phase, stage), whole in staged.graphs.items():
        if phase is B:
            graphs[R, stage], graphs[B, stage] = _halves(whole)
            after[stage], waiting[stage] = memory_between(graphs[R, stage], graphs[B, stage], named)
    return replace(staged, graphs=graphs, recomputed_memory=tuple(after), waiting_memory=tuple(waiting))


def _halves(whole: PhaseGraph) -> tuple[PhaseGraph, PhaseGraph]:
    results, order = results_of(whole.graph), {node: at for at, node in enumerate(whole.graph.nodes)}
    own = _recomputed(whole)
    rest = {node for node in order if runs(node) and node not in own}
    seam = Seam(whole, own, {node for _, node in results}, is_cheap, moves=False)
    kept, _ = seam.cut(order.__getitem__)
    handed = kept & own
    needed = reached(handed, lambda node: [source for source in node.all_input_nodes if source in own])
    again = until(seam.read(rest) & own, kept)
    return checked_halves(whole, Half(R, needed, []), Half(B, rest | again, results), handed, is_cheap)


def _recomputed(whole: PhaseGraph) -> set[fx.Node]:
    """The recomputed values, and the values without a stage that they read; none that needs a received value."""
    found: set[fx.Node] = set()
    for node in filter(runs, whole.graph.nodes):
        of_forward = node.meta.get("recomputed") or node.meta["stage"] is None
        if of_forward and all(source in found or _is_at_hand(source) for source in node.all_input_nodes):
            found.add(node)
    wanted = [node for node in found if node.meta.get("recomputed")]
    return reached(wanted, lambda node: [source for source in node.all_input_nodes if source in found])


def _is_at_hand(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "placeholder" and not isinstance(node.meta["role"], program.Received))
