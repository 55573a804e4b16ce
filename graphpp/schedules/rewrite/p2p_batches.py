"""One rank's row while its sends and receives are joined into batches, and the graph of waits between its events.

At first every send and receive is a batch by itself. `join` moves the batch at one column into the batch at another column,
unless some event would then wait for itself. The waits are those of `graphpp.schedules.check.deadlock`, in one
`DynamicTopologicalOrder` for all ranks: a batch is posted after the computation before it and after the end of the previous
batch; its messages run once it is posted; it ends, and the readers of its messages go on, when all messages have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from graphpp.schedules.check.schedule_under_check import Position
from graphpp.schedules.table.actions import SENDS, Action, Kind, computations, peer, send_of
from graphpp.schedules.table.schedule import Row


class _Posting(NamedTuple):
    """A moment of the batch at (rank, column): it is posted (`over` False), or it has ended (`over` True)."""

    rank: int
    column: int
    over: bool


N = TypeVar("N", bound=Hashable)
BatchNode = Position | Action | _Posting
Edge = tuple[BatchNode, BatchNode]
Channel = tuple[bool, int]
"""Sends to a rank (True), or receives from it (False)."""


class Batches:
    """A row with batches. `columns`: by a batch's column, its messages' original columns; `places`: its keys in order."""

    def __init__(self, rank: int, row: Row, rank_of: Mapping[int, int]) -> None:
        self._rank, self.row, self._rank_of = rank, row, rank_of
        messages = [at for at, action in enumerate(row) if action is not None and action.is_communication]
        self.columns: dict[int, tuple[int, ...]] = {at: (at,) for at in messages}
        self.places = messages
        self._before: list[BatchNode | None] = [None] * len(row)  # the computation before each column
        self._reader: dict[Action, BatchNode] = {}
        last: BatchNode | None = None
        for column, action in enumerate(row):
            self._before[column] = last
            if action is not None and not action.is_communication:
                last = Position(rank, column)
                self._reader.update(dict.fromkeys(action.leaves, last))

    def edges(self) -> Iterator[Edge]:
        """(before, after) pairs of this rank's events: computations, messages (as sends), batches posted and ended."""
        for column, action in enumerate(self.row):
            before = self._before[column]
            if before is not None and action is not None and not action.is_communication:
                yield before, Position(self._rank, column)
        for at in self.places:
            yield from self._own(at)
        yield from self._chain(self.places)

    def _chain(self, places: Sequence[int]) -> Iterator[Edge]:
        """Each batch is posted after the end of the previous batch."""
        return ((self._post(one, over=True), self._post(other)) for one, other in pairwise(places))

    def _own(self, at: int) -> Iterator[Edge]:
        """The edges of the batch at `at`, without its edges to neighbouring batches."""
        before = self._before[at]
        if before is not None:
            yield before, self._post(at)
        yield self._post(at), self._post(at, over=True)
        yield from self._parts(at, at)

    def _parts(self, of: int, at: int) -> Iterator[Edge]:
        """The edges of the messages of the batch at `of`, if they are placed at `at`."""
        for leaf in self.leaves(of):
            yield self._post(at), send_of(leaf)
            yield send_of(leaf), self._post(at, over=True)
            yield from ((self._post(at, over=True), self._reader[each]) for each in readers(leaf) if each in self._reader)

    def _post(self, at: int, *, over: bool = False) -> _Posting:
        return _Posting(self._rank, at, over)

    def join(self, source: int, target: int, order: DynamicTopologicalOrder[BatchNode]) -> bool:
        """Move the batch at `source` into the one at `target`; False, with nothing changed, if that closes a cycle of waits."""
        where = bisect_left(self.places, source)
        before, after = self.places[max(0, where - 1) : where], self.places[where + 1 : where + 2]
        old, new = [*self._own(source), *self._chain([*before, source, *after])], [*self._parts(source, target)]
        new += self._chain([*before, *after])
        if not _exchanged(order, old, new):
            return False
        self.columns[target] = tuple(sorted(self.columns.pop(source) + self.columns[target]))
        del self.places[where]
        return True

    def cells(self) -> Row:
        found: list[Action | None] = []
        for at, action in enumerate(self.row):
            if action is None or not action.is_communication:
                found.append(action)
            elif at in self.columns:
                leaves = self.leaves(at)
                found.append(leaves[0] if len(leaves) == 1 else Action(-1, Kind.P2P, None, leaves))
        return tuple(found)

    def leaves(self, at: int) -> tuple[Action, ...]:
        """The messages of the batch at `at`, in their original order."""
        actions = [self.row[column] for column in self.columns[at]]
        return tuple(leaf for action in actions if action is not None for leaf in action.leaves)

    def channels(self, leaves: Sequence[Action]) -> set[Channel]:
        return {(leaf.kind in SENDS, self.peer(leaf)) for leaf in leaves}

    def peer(self, leaf: Action) -> int:
        return self._rank_of[peer(leaf).stage]


def readers(receive: Action) -> tuple[Action, ...]:
    """The computations one of which reads the received value; empty for a send."""
    return () if receive.kind in SENDS else computations(receive)


def _exchanged(order: DynamicTopologicalOrder[BatchNode], old: Sequence[Edge], new: Sequence[Edge]) -> bool:
    """Replace the edges `old` by `new`; returns False, with the order restored, if that closes a cycle."""
    removed = [edge for edge in dict.fromkeys(old) if order.has(*edge)]
    for edge in removed:
        order.remove(*edge)
    added: list[Edge] = []
    for edge in dict.fromkeys(new):
        if order.has(*edge):
            continue
        if not order.add(*edge):
            for each in added:
                order.remove(*each)
            for each in removed:
                order.add(*each)
            return False
        added.append(edge)
    return True


class DynamicTopologicalOrder(Generic[N]):
    """A topological order of a graph while edges change (Pearce and Kelly 2006). Raises `graphlib.CycleError` for a cycle."""

    def __init__(self, edges: Iterable[tuple[N, N]]) -> None:
        self._after: dict[N, set[N]] = defaultdict(set)
        self._before: dict[N, set[N]] = defaultdict(set)
        for one, other in edges:
            self._after[one].add(other)
            self._before[other].add(one)
        order = TopologicalSorter(self._before).static_order()
        self._place = {node: place for place, node in enumerate(order)}

    def has(self, one: N, other: N) -> bool:
        return other in self._after[one]

    def remove(self, one: N, other: N) -> None:
        self._after[one].remove(other)
        self._before[other].remove(one)

    def add(self, one: N, other: N) -> bool:
        """Add an edge from `one` to `other`; returns False and changes nothing if that would close a cycle."""
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
