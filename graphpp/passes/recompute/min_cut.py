"""Choose, by a minimum cut, which values of a group to keep and which to recompute, at a price per byte and per cost.

Contract: a `CutProblem` numbers its values 0, 1, .. in the order in which the forward computes them. Every value that the
backward reads must be available there: kept, at the price of its bytes, or recomputed, at the price of its cost and with its
inputs available. `solve` minimises bytes x price of a byte + cost x price of cost; among equal choices it recomputes the least.
`pareto_front` lists the choices that are best at some price, from the most bytes to the fewest.

The network is that of torch's functorch min-cut partitioner, with a price on recomputation. Each value has two nodes, "computed
in the forward" and "available in the backward". A cut between them keeps the value; a cut between the source and the first node
recomputes it, and infinite edges make its inputs available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

_SOURCE, _SINK = -1, -2
_DEPTH = 6  # a front has at most 2 ** 6 + 1 points; a cut through a thousand values takes a second


@dataclass(frozen=True)
class CutProblem:
    """Values by number; each tuple has one entry per value.

    `nbytes`: of keeping the value, None if it cannot be kept. `costs`: of recomputing it, None if it cannot be recomputed.
    `inputs`: the values from which it is recomputed, except values available without saving. `read`: whether the backward reads
    it. A value that cannot be kept must be recomputable from values that can.
    """

    nbytes: tuple[int | None, ...]
    costs: tuple[int | None, ...]
    inputs: tuple[tuple[int, ...], ...]
    read: tuple[bool, ...]


@dataclass(frozen=True)
class CutSolution:
    """A choice: whether each value is recomputed, the total bytes kept, the total cost of recomputation."""

    recomputed: tuple[bool, ...]
    nbytes: int
    cost: int


def solve(problem: CutProblem, byte_price: int, cost_price: int) -> CutSolution:
    """The cheapest choice. Integer prices make it equal on all ranks."""
    if len(problem.read) == 1:
        return _alone(problem, byte_price, cost_price)
    import networkx as nx  # takes 0.25 s, which `import graphpp` avoids

    network = nx.DiGraph()
    for value, (nbytes, cost) in enumerate(zip(problem.nbytes, problem.costs, strict=True)):
        computed, available = 2 * value, 2 * value + 1
        _edge(network, _SOURCE, computed, cost, cost_price)
        _edge(network, computed, available, nbytes, byte_price)
        if problem.read[value]:
            network.add_edge(available, _SINK)
        network.add_edges_from((2 * source + 1, computed) for source in problem.inputs[value])
    _, (near, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    return _solution(problem, [2 * value not in near for value in range(len(problem.read))], near)


def pareto_front(problem: CutProblem) -> list[CutSolution]:
    """The choices that are best at some price of a byte, from most to fewest bytes, and so from low to high cost."""
    most, fewest = solve(problem, 1, _weight(problem.nbytes)), solve(problem, _weight(problem.costs), 1)
    if fewest.nbytes >= most.nbytes:
        return [most]
    return [most, *_between(problem, most, fewest), fewest]


def _between(problem: CutProblem, more: CutSolution, less: CutSolution, depth: int = _DEPTH) -> list[CutSolution]:
    """The points of the front between two points: solve at the price at which both cost the same, and recurse."""
    byte_price, cost_price = less.cost - more.cost, more.nbytes - less.nbytes
    if byte_price <= 0 or cost_price <= 0 or not depth:
        return []
    found = solve(problem, byte_price, cost_price)
    gain = (more.nbytes - found.nbytes) * byte_price + (more.cost - found.cost) * cost_price
    if gain <= 0:
        return []
    return [*_between(problem, more, found, depth - 1), found, *_between(problem, found, less, depth - 1)]


def _weight(numbers: Sequence[int | None]) -> int:
    """A price at which one unit of one kind outweighs the sum of these numbers of the other kind."""
    return 1 + sum(number or 0 for number in numbers)


def _edge(network: nx.DiGraph, start: int, end: int, number: int | None, price: int) -> None:
    if number is None:
        network.add_edge(start, end)
    else:
        network.add_edge(start, end, capacity=number * price)


def _alone(problem: CutProblem, byte_price: int, cost_price: int) -> CutSolution:
    (nbytes,), (cost,) = problem.nbytes, problem.costs
    recomputed = cost is not None and (nbytes is None or cost * cost_price < nbytes * byte_price)
    return CutSolution((recomputed,), 0 if recomputed else nbytes or 0, cost or 0 if recomputed else 0)


def _solution(problem: CutProblem, recomputed: list[bool], near: set[int]) -> CutSolution:
    kept = [value for value, is_recomputed in enumerate(recomputed) if not is_recomputed and 2 * value + 1 not in near]
    cost = sum(problem.costs[value] or 0 for value, is_recomputed in enumerate(recomputed) if is_recomputed)
    return CutSolution(tuple(recomputed), sum(problem.nbytes[value] or 0 for value in kept), cost)
