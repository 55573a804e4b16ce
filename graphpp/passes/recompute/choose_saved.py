"""What each stage computes again in its backward, not to save it.

Contract
--------
Without a `fraction`: the free wins. Only cheap operations run again (views, casts, pointwise ones, norms, look-ups), and
only where a byte less is worth their time (`worth`, in seconds a byte), so chains are short and small values stay saved.

With a `fraction` of the bytes that the stage would save so: of the choices that keep few enough bytes the one that takes
the least time, as far as a price per byte can tell them apart. Then all operations of a `region` (a layer) may run again,
too, if what they make stays in it; so the backward has one region's values at a time. Where equal layers cost
equally, those of the front are computed again first: the others' are gone when theirs are made. A fraction that is too
small is met as well as possible; a stage's `saved_bytes` says how well.

The choice depends on the graph and on constants alone: every rank finds the same one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

from torch import fx

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import Cost, is_cheap
from graphpp.passes.recompute.backward_needs import MayRecompute, ValueGroup, backward_needs, is_free
from graphpp.passes.recompute.min_cut import CutProblem, CutSolution, pareto_front, solve
from graphpp.passes.recompute.recompute_regions import RegionOf, always

_PICOSECONDS = 1e12
RecomputedByStage = Sequence[set[fx.Node]]
T = TypeVar("T")


@dataclass(frozen=True)
class RecomputeBudget:
    """On what terms values are computed again (see the head of the file); `chosen` has a say over every operation."""

    seconds_per_byte: float
    cost: Cost
    fraction: float | None = None
    region_of: RegionOf = lambda node: None
    may_recompute: MayRecompute = always


def choose_recomputed(joint: JointGraph, stages: int, terms: RecomputeBudget) -> RecomputedByStage:
    """For each stage the forward values that its backward computes again; nodes carry `meta["stage"]`."""
    choice = _Choice(joint, terms)
    return [choice.of_stage(stage) for stage in range(stages)]


class _Choice:
    def __init__(self, joint: JointGraph, terms: RecomputeBudget) -> None:
        self._joint, self._terms = joint, terms
        self._hulls: dict[CutProblem, list[CutSolution]] = {}
        self._solved: dict[CutProblem, CutSolution] = {}

    def of_stage(self, stage: int) -> set[fx.Node]:
        terms = self._terms
        pieces = backward_needs(self._joint, stage, lambda node: is_cheap(node) and terms.may_recompute(node), terms.cost)
        solutions = [_once(self._solved, piece.shape, self._cheapest) for piece in pieces]
        again = _nodes(pieces, solutions)
        if terms.fraction is None:
            return again
        budget = int(terms.fraction * sum(solution.nbytes for solution in solutions))
        pieces = backward_needs(self._joint, stage, self._may(stage, again), terms.cost)
        return _nodes(pieces, _within(budget, [_once(self._hulls, piece.shape, pareto_front) for piece in pieces]))

    def _cheapest(self, shape: CutProblem) -> CutSolution:
        return solve(shape, max(1, round(self._terms.seconds_per_byte * _PICOSECONDS)), 1)

    def _may(self, stage: int, cheaply: set[fx.Node]) -> MayRecompute:
        """What may run again for a budget: what would anyway, and what stays in its region."""
        inside = partial(_inside, self._terms.region_of, stage)
        return lambda node: node in cheaply or (self._terms.may_recompute(node) and inside(node))


def _inside(region: RegionOf, stage: int, node: fx.Node) -> bool:
    """Whether the forward reads a value, its parts and views of it in its own region and stage only."""
    place = region(node)
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output":
            return False
        if not user.meta["backward"]:
            if user.meta["stage"] != stage or region(user) != place:
                return False
            pending += user.users if user.target is operator.getitem or is_free(user) else ()
    return True


def _within(budget: int, hulls: Sequence[list[CutSolution]]) -> list[CutSolution]:
    """One choice for each piece that together keep at most `budget` bytes, if they can: the best bargains first."""
    chosen = [choices[0] for choices in hulls]
    over = sum(choice.nbytes for choice in chosen) - budget
    for _, at, choice in sorted(_bargains(hulls), key=lambda bargain: bargain[:2]):
        if over <= 0:
            break
        over -= chosen[at].nbytes - choice.nbytes
        chosen[at] = choice
    return chosen


def _bargains(hulls: Sequence[list[CutSolution]]) -> list[tuple[float, int, CutSolution]]:
    """(cost of a byte less, piece, choice) of every step along the hulls; along one hull the cost only rises."""
    return [
        ((less.cost - more.cost) / (more.nbytes - less.nbytes), at, less)
        for at, choices in enumerate(hulls)
        for more, less in pairwise(choices)
    ]


def _once(known: dict[CutProblem, T], shape: CutProblem, find: Callable[[CutProblem], T]) -> T:
    if shape not in known:
        known[shape] = find(shape)
    return known[shape]


def _nodes(pieces: Sequence[ValueGroup], solutions: Sequence[CutSolution]) -> set[fx.Node]:
    pairs = zip(pieces, solutions, strict=True)
    return {node for piece, found in pairs for node, again in zip(piece.nodes, found.again, strict=True) if again}
