"""Maintain a topological order while edges are added to a graph and removed from it.

Contract
    `DynamicTopologicalOrder(edges)` takes (before, after) pairs without a cycle. `add` inserts an edge and reorders only
    the nodes between its two ends, or returns False and changes nothing if the edge would close a cycle. `remove` needs
    no reordering. Algorithm: Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2006.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from graphlib import TopologicalSorter
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)


class DynamicTopologicalOrder(Generic[N]):
    """The position of each node in the order; raises `graphlib.CycleError` if the first edges have a cycle."""

    def __init__(self, edges: Iterable[tuple[N, N]]) -> None:
        self._after: dict[N, set[N]] = defaultdict(set)
        self._before: dict[N, set[N]] = defaultdict(set)
        for one, other in edges:
            self._after[one].add(other)
            self._before[other].add(one)
        order = TopologicalSorter(self._before).static_order()
        self._place = {node: place for place, node in enumerate(order)}

    def has(self, one: N, other: N) -> bool:
        """True if the edge is in the graph."""
        return other in self._after[one]

    def remove(self, one: N, other: N) -> None:
        """Remove an edge."""
        self._after[one].remove(other)
        self._before[other].remove(one)

    def add(self, one: N, other: N) -> bool:
        """Add an edge from `one` to `other`; returns False and changes nothing if other edges put `other` before `one`."""
        place = self._place
        low, high = place[other], place[one]
        if low <= high:
            later = _reach(other, self._after, lambda node: place[node] <= high)
            if one in later:
                return False
            self._rearrange(_reach(one, self._before, lambda node: place[node] >= low), later)
        self._after[one].add(other)
        self._before[other].add(one)
        return True

    def _rearrange(self, first: set[N], then: set[N]) -> None:
        """Redistribute the positions of both sets of nodes, the lower ones to `first`."""
        place = self._place
        nodes = sorted(first, key=place.__getitem__) + sorted(then, key=place.__getitem__)
        for node, at in zip(nodes, sorted(place[node] for node in nodes), strict=True):
            place[node] = at


def _reach(start: N, edges: dict[N, set[N]], within: Callable[[N], bool]) -> set[N]:
    """The nodes that can be reached from `start` through nodes for which `within` holds, `start` included."""
    seen, todo = {start}, [start]
    while todo:
        for node in edges[todo.pop()]:
            if node not in seen and within(node):
                seen.add(node)
                todo.append(node)
    return seen
