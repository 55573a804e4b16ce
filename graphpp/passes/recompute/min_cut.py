"""Which values to keep and which to compute again: the cheapest choice over a graph of numbers, as a minimum cut.

Contract
--------
A `CutProblem` is values 0, 1, .. in order of their making. Whatever is read must be there in the end: kept, which takes its
bytes, or computed again, which takes its cost and needs its inputs there too. `solve` finds the choice of the least
bytes x price of a byte + cost x price of cost; of equal ones that which computes least again. `pareto_front` has all choices
that are best at some price, from the most bytes to the fewest.

The network: each value is two nodes, "made by the forward" and "there in the backward", on either side of the cut. Keeping a
value cuts between its two; computing it again cuts it off from the source; what it is computed from is then there, too.
(The network of activation checkpointing by minimum cut, as in torch's functorch partitioner, with a price on running again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

_SOURCE, _SINK = -1, -2
_DEEP = 6  # a hull has at most 2 ** 6 + 1 corners: a piece of a thousand values takes a second for each


@dataclass(frozen=True)
class CutProblem:
    """Values by their numbers. `nbytes`: to keep one, None: it is never kept; `costs`: to compute it again, None: it never is.

    `inputs`: what each is computed from, of what need not be there anyway; `read`: whether it is read in the backward. A
    value that is never kept can be computed again from such that can be kept.
    """

    nbytes: tuple[int | None, ...]
    costs: tuple[int | None, ...]
    inputs: tuple[tuple[int, ...], ...]
    read: tuple[bool, ...]


@dataclass(frozen=True)
class CutSolution:
    """Which values are computed again, the bytes that are kept, and the cost."""

    again: tuple[bool, ...]
    nbytes: int
    cost: int


def solve(shape: CutProblem, byte_price: int, cost_price: int) -> CutSolution:
    """The cheapest choice; prices are whole numbers, so that every rank finds the same one."""
    if len(shape.read) == 1:
        return _alone(shape, byte_price, cost_price)
    import networkx as nx  # 0.25 s that `import graphpp` need not take

    network = nx.DiGraph()
    for value, (nbytes, cost) in enumerate(zip(shape.nbytes, shape.costs, strict=True)):
        made, there = 2 * value, 2 * value + 1
        _edge(network, _SOURCE, made, cost, cost_price)
        _edge(network, made, there, nbytes, byte_price)
        if shape.read[value]:
            network.add_edge(there, _SINK)
        network.add_edges_from((2 * source + 1, made) for source in shape.inputs[value])
    _, (near, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    return _solution(shape, [2 * value not in near for value in range(len(shape.read))], near)


def pareto_front(shape: CutProblem) -> list[CutSolution]:
    """The choices that are best at some price of a byte, from the most bytes kept to the fewest; costs rise."""
    most, fewest = solve(shape, 1, _weight(shape.nbytes)), solve(shape, _weight(shape.costs), 1)
    if fewest.nbytes >= most.nbytes:
        return [most]
    return [most, *_between(shape, most, fewest), fewest]


def _between(shape: CutProblem, more: CutSolution, less: CutSolution, deep: int = _DEEP) -> list[CutSolution]:
    """The choices below the line through two: asked for at the price at which those two are equally good."""
    byte_price, cost_price = less.cost - more.cost, more.nbytes - less.nbytes
    if byte_price <= 0 or cost_price <= 0 or not deep:
        return []
    found = solve(shape, byte_price, cost_price)
    gain = (more.nbytes - found.nbytes) * byte_price + (more.cost - found.cost) * cost_price
    if gain <= 0:
        return []
    return [*_between(shape, more, found, deep - 1), found, *_between(shape, found, less, deep - 1)]


def _weight(numbers: Sequence[int | None]) -> int:
    """A price at which one unit counts more than all of these together."""
    return 1 + sum(number or 0 for number in numbers)


def _edge(network: nx.DiGraph, start: int, end: int, number: int | None, price: int) -> None:
    """An edge of that capacity, or one that is never cut."""
    if number is None:
        network.add_edge(start, end)
    else:
        network.add_edge(start, end, capacity=number * price)


def _alone(shape: CutProblem, byte_price: int, cost_price: int) -> CutSolution:
    """The choice for one value."""
    (nbytes,), (cost,) = shape.nbytes, shape.costs
    again = cost is not None and (nbytes is None or cost * cost_price < nbytes * byte_price)
    return CutSolution((again,), 0 if again else nbytes or 0, cost or 0 if again else 0)


def _solution(shape: CutProblem, again: list[bool], near: set[int]) -> CutSolution:
    kept = [value for value, repeated in enumerate(again) if not repeated and 2 * value + 1 not in near]
    cost = sum(shape.costs[value] or 0 for value, repeated in enumerate(again) if repeated)
    return CutSolution(tuple(again), sum(shape.nbytes[value] or 0 for value in kept), cost)
