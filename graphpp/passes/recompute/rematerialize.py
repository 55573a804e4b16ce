"""Rematerialize single values: choose, per stage, the forward values that the backward recomputes, and recompute them.

Contract of `choose_recomputed`: without a `fraction`, only cheap operations run again (views, casts, pointwise operations,
norms, look-ups), at a cost of at most `seconds_per_byte` for each byte less to save. So chains stay short and small values stay
saved.

With a `fraction`, a stage may save at most this fraction of the bytes that it would save without one. Then all operations of a
region (such as a layer) may run again if their values stay inside the region, so that the backward holds the recomputed values
of one region at a time. The choice is the cheapest in time within the budget, as far as a price per byte can distinguish. Of
equal layers the front ones are recomputed first: their backward runs last, when the saved values of later layers are freed. A
fraction that is too small is met as closely as possible. The choice depends only on the graph and constants, so it is equal on
all ranks.

Contract of `rematerialize`: afterwards the stage's backward reads a copy of each chosen value, right before its first reader,
computed from saved or otherwise available values, or other copies. Each value has at most one copy in a stage, marked
`meta["recomputed"]`. Nodes that only the backward had read leave the forward. No bit and no value across a boundary changes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph, reached, remove_unused
from graphpp.passes.graph.op_costs import Cost, is_cheap
from graphpp.passes.recompute.backward_needs import (
    PICOSECONDS,
    MayRecompute,
    RegionOf,
    StageIndex,
    ValueGroup,
    always,
    backward_needs,
    is_free,
)
from graphpp.passes.recompute.min_cut import CutProblem, CutSolution, pareto_front, solve
from graphpp.runtime import program

RecomputedByStage = Mapping[int, set[fx.Node]]


@dataclass(frozen=True)
class RecomputeBudget:
    """The terms of recomputing single values (see the head of the file); `may_recompute` can forbid any operation."""

    seconds_per_byte: float
    cost: Cost
    fraction: float | None = None
    region_of: RegionOf = lambda node: None
    may_recompute: MayRecompute = always


def choose_recomputed(joint: JointGraph, stages: int, budget: RecomputeBudget) -> RecomputedByStage:
    """For each stage the forward values that its backward recomputes; nodes need `meta["stage"]`."""
    choice = _Choice(joint, budget)
    return {stage: choice.of_stage(stage) for stage in range(stages)}


class _Choice:
    """The choices for the stages of one graph; equal layers are equal problems, each solved once."""

    def __init__(self, joint: JointGraph, budget: RecomputeBudget) -> None:
        self._index, self._budget = StageIndex(joint), budget
        self._front, self._cheapest = cache(pareto_front), cache(self._solve)

    def of_stage(self, stage: int) -> set[fx.Node]:
        budget = self._budget
        groups = backward_needs(self._index, stage, self._is_cheap, budget.cost)
        solutions = [self._cheapest(group.problem) for group in groups]
        recomputed = _recomputed(groups, solutions)
        if budget.fraction is None:
            return recomputed
        most_bytes = int(budget.fraction * sum(solution.nbytes for solution in solutions))
        groups = backward_needs(self._index, stage, self._may_recompute(stage, recomputed), budget.cost)
        fronts = [self._front(group.problem) for group in groups]
        return _recomputed(groups, _within(most_bytes, fronts))

    def _is_cheap(self, node: fx.Node) -> bool:
        return is_cheap(node) and self._budget.may_recompute(node)

    def _solve(self, problem: CutProblem) -> CutSolution:
        return solve(problem, max(1, round(self._budget.seconds_per_byte * PICOSECONDS)), 1)

    def _may_recompute(self, stage: int, cheaply: set[fx.Node]) -> MayRecompute:
        """The operations that may run again under a fraction: cheap ones chosen without it, and those inside a region."""
        inside = partial(_inside, self._budget.region_of, stage)
        return lambda node: node in cheaply or (self._budget.may_recompute(node) and inside(node))


def _inside(region_of: RegionOf, stage: int, node: fx.Node) -> bool:
    """Whether the forward reads a value, its items and its views only in the value's own region and stage."""
    region = region_of(node)
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output":
            return False
        if not user.meta["backward"]:
            if user.meta["stage"] != stage or region_of(user) != region:
                return False
            pending += user.users if user.target is operator.getitem or is_free(user) else ()
    return True


def _within(most_bytes: int, fronts: Sequence[list[CutSolution]]) -> list[CutSolution]:
    """One choice per group that together save at most `most_bytes`, if possible: trade the cheapest bytes first."""
    chosen = [choices[0] for choices in fronts]
    over = sum(choice.nbytes for choice in chosen) - most_bytes
    for _, group, choice in sorted(_trades(fronts), key=lambda trade: trade[:2]):
        if over <= 0:
            break
        over -= chosen[group].nbytes - choice.nbytes
        chosen[group] = choice
    return chosen


def _trades(fronts: Sequence[list[CutSolution]]) -> list[tuple[float, int, CutSolution]]:
    """(cost per saved byte, group, choice) of every step along the fronts; along a front the cost per byte only rises."""
    return [
        ((less.cost - more.cost) / (more.nbytes - less.nbytes), group, less)
        for group, choices in enumerate(fronts)
        for more, less in pairwise(choices)
    ]


def _recomputed(groups: Sequence[ValueGroup], solutions: Sequence[CutSolution]) -> set[fx.Node]:
    return {
        node
        for group, solution in zip(groups, solutions, strict=True)
        for node, recomputed in zip(group.nodes, solution.recomputed, strict=True)
        if recomputed
    }


def rematerialize(joint: JointGraph, recomputed: RecomputedByStage) -> JointGraph:
    """Let the backward of every stage recompute the given values, in place; nodes need `meta["stage"]`."""
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    copies = {stage: _Copies(joint.graph, order, stage, values) for stage, values in recomputed.items()}
    for reader in list(joint.computed()):
        if reader.meta["backward"] and reader.meta["stage"] in copies:
            of_stage = copies[reader.meta["stage"]]
            for node in reader.all_input_nodes:
                if node in of_stage.values:
                    reader.replace_input_with(node, of_stage.before(reader, node))
    end, outputs = joint.graph.output_node(), joint.outputs()
    for at, (role, node) in enumerate(outputs):
        if isinstance(role, program.Gradient) and node.meta["stage"] in copies:
            outputs[at] = (role, copies[node.meta["stage"]].before(end, node))
    joint.set_outputs(outputs)
    remove_unused(joint.graph)
    return joint


class _Copies:
    """The copies of `values` in the backward of one stage; `order`: the position of each node in the graph."""

    def __init__(self, graph: fx.Graph, order: Mapping[fx.Node, int], stage: int, values: set[fx.Node]) -> None:
        self.values = values
        self._graph, self._order, self._stage, self._copies = graph, order, stage, dict[fx.Node, fx.Node]()

    def before(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """The copy of a value, inserted before the first `reader`; the value itself if it is not recomputed."""
        if node in self.values and node not in self._copies:
            self._copy(reader, node)
        return self._copies.get(node, node)

    def _copy(self, reader: fx.Node, node: fx.Node) -> None:
        def missing(node: fx.Node) -> list[fx.Node]:
            return [source for source in node.all_input_nodes if source in self.values and source not in self._copies]

        with self._graph.inserting_before(reader):
            for each in sorted(reached([node], missing), key=self._order.__getitem__):
                copy = self._graph.node_copy(each, lambda source: self._copies.get(source, source))
                copy.meta = {**each.meta, "stage": self._stage, "backward": True, "position": -1, "recomputed": True}
                self._copies[each] = copy
