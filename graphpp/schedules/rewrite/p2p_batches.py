"""One rank's row while its sends and receives are joined into batches, and the graph of waits between its events.

Contract
    At first every send and receive is a batch by itself. `join` moves the batch at one column into the batch at another
    column, unless some event would then wait for itself. The waits are those of `graphpp.schedules.check.deadlock`, kept
    in one `DynamicTopologicalOrder` for all ranks: a batch is posted after the computation before it and after the end of
    the batch before it; its messages run once it is posted; it ends when all of them have ended; the computations that
    read its messages wait for its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from graphpp.schedules.check.schedule_under_check import Position
from graphpp.schedules.rewrite.topological_order import DynamicTopologicalOrder
from graphpp.schedules.table.actions import SENDS, Action, Kind, computations, peer
from graphpp.schedules.table.schedule import Row


class _Posting(NamedTuple):
    """A batch, or a message alone, is posted, or over: where it stands."""

    rank: int
    column: int
    over: bool


BatchNode = Position | Action | _Posting
Edge = tuple[BatchNode, BatchNode]
Channel = tuple[bool, int]
"""Sends to a rank (True), or receives from it."""


class Batches:
    """One rank's list.

    `columns` has, by the column where a batch stands, the columns that its messages had at first; `places` are its keys,
    ascending.
    """

    def __init__(self, rank: int, row: Row, rank_of: Mapping[int, int]) -> None:
        self._rank, self.row, self._rank_of = rank, row, rank_of
        messages = [at for at, action in enumerate(row) if action is not None and action.is_communication]
        self.columns: dict[int, tuple[int, ...]] = {at: (at,) for at in messages}
        self.places = messages
        self._before: list[BatchNode | None] = [None] * len(row)  # the computation before each column
        self._reader: dict[Action, BatchNode] = {}
        self._place_computations()

    def _place_computations(self) -> None:
        last: BatchNode | None = None
        for column, action in enumerate(self.row):
            self._before[column] = last
            if action is not None and not action.is_communication:
                last = Position(self._rank, column)
                self._reader.update(dict.fromkeys(action.leaves, last))

    # ------------------------------------------------------------------------------ the graph of waits

    def edges(self) -> Iterator[Edge]:
        """Which of this rank's events come before which: computations, posts, messages (their send stands for both ends)."""
        for column, action in enumerate(self.row):
            before = self._before[column]
            if before is not None and action is not None and not action.is_communication:
                yield before, Position(self._rank, column)
        for at in self.places:
            yield from self._own(at)
        yield from self._chain(self.places)

    def _chain(self, places: Sequence[int]) -> Iterator[Edge]:
        """One batch after another."""
        return ((self._post(one, over=True), self._post(other)) for one, other in pairwise(places))

    def _own(self, at: int) -> Iterator[Edge]:
        """What a batch waits for, but for the batch before it, and who waits for it."""
        before = self._before[at]
        if before is not None:
            yield before, self._post(at)
        yield self._post(at), self._post(at, over=True)
        yield from self._parts(at, at)

    def _parts(self, of: int, at: int) -> Iterator[Edge]:
        """What comes with the messages of the batch at `of` when they stand at `at`."""
        for leaf in self.leaves(of):
            yield self._post(at), _sent(leaf)
            yield _sent(leaf), self._post(at, over=True)
            yield from ((self._post(at, over=True), self._reader[each]) for each in readers(leaf) if each in self._reader)

    def _post(self, at: int, *, over: bool = False) -> _Posting:
        return _Posting(self._rank, at, over)

    def join(self, gone: int, kept: int, order: DynamicTopologicalOrder[BatchNode]) -> bool:
        """Put the batch at `gone` into the one at `kept`, unless a cycle of waits would arise."""
        where = bisect_left(self.places, gone)
        before, after = self.places[max(0, where - 1) : where], self.places[where + 1 : where + 2]
        old, new = [*self._own(gone), *self._chain([*before, gone, *after])], [*self._parts(gone, kept)]
        new += self._chain([*before, *after])
        if not _exchanged(order, old, new):
            return False
        self.columns[kept] = tuple(sorted(self.columns.pop(gone) + self.columns[kept]))
        del self.places[where]
        return True

    # ------------------------------------------------------------------------------ the list

    def cells(self) -> Row:
        """The list as it is now."""
        found: list[Action | None] = []
        for at, action in enumerate(self.row):
            if action is None or not action.is_communication:
                found.append(action)
            elif at in self.columns:
                leaves = self.leaves(at)
                found.append(leaves[0] if len(leaves) == 1 else Action(-1, Kind.P2P, None, leaves))
        return tuple(found)

    def leaves(self, at: int) -> tuple[Action, ...]:
        """The messages that stand at `at`, in their first order."""
        actions = [self.row[column] for column in self.columns[at]]
        return tuple(leaf for action in actions if action is not None for leaf in action.leaves)

    def channels(self, leaves: Sequence[Action]) -> set[Channel]:
        """The channels these messages take."""
        return {(leaf.kind in SENDS, self.peer(leaf)) for leaf in leaves}

    def peer(self, leaf: Action) -> int:
        """The rank at a message's other end."""
        return self._rank_of[peer(leaf).stage]


def readers(receive: Action) -> tuple[Action, ...]:
    """The computations one of which reads what is received; empty for a send."""
    return () if receive.kind in SENDS else computations(receive)


def _sent(leaf: Action) -> Action:
    """A message by its send."""
    return leaf if leaf.kind in SENDS else peer(leaf)


def _exchanged(order: DynamicTopologicalOrder[BatchNode], old: Sequence[Edge], new: Sequence[Edge]) -> bool:
    """Edges `new` for edges `old`; False, with all as it was, where that closes a cycle."""
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
