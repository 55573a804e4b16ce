"""Takes batches apart into single sends and receives, for a transport that posts, or blocks on, one after another.

Contract
    in    a schedule whose batches (P2P) `graphpp.runtime.checker.check` accepts
    out   the same without batches, which `check` accepts too: no order of the ranks' calls hangs, not even if each send
          blocks until it is received

        r0 (0SEND_F1;0RECV_B0)P2P        r0 0SEND_F1 0RECV_B0
        r1 (1RECV_F1;1SEND_B0)P2P   ->   r1 1RECV_F1 1SEND_B0

    Even ranks post a batch's sends before its receives, odd ranks its receives before its sends, so that of two
    neighbours one listens while the other talks. Where ranks that exchange are both even or both odd that may hang; then
    all ranks follow one total order of the messages, which the proof of the batched table yields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from graphpp.runtime.actions import SENDS, Action, Kind
from graphpp.runtime.case import Case
from graphpp.runtime.deadlock import find_cycle, waits
from graphpp.runtime.schedule import Schedule

Key = Callable[[int, Action], int]


def order_even_odd(schedule: Schedule) -> Schedule:
    """The schedule without batches; sends and receives that are in none stay as they are."""
    apart = _apart(schedule, _by_parity)
    return _apart(schedule, _by_order(schedule)) if find_cycle(Case.of(apart)) else apart


def _by_parity(rank: int, leaf: Action) -> int:
    return int((leaf.kind in SENDS) == bool(rank % 2))


def _by_order(schedule: Schedule) -> Key:
    """Where a message stands in an order in which all of them can be over, one at a time."""
    case = Case.of(schedule)
    place = {node: number for number, node in enumerate(TopologicalSorter(waits(case)).static_order())}
    send_of = {receive: send for _, send, receive in case.messages}
    return lambda rank, leaf: place[send_of.get(leaf, leaf)]


def _apart(schedule: Schedule, key: Key) -> Schedule:
    def single(rank: int, cell: Action | None) -> Sequence[Action | None]:
        if cell is None or cell.kind is not Kind.P2P:
            return [cell]
        return sorted(cell.parts, key=lambda leaf: key(rank, leaf))

    rows = enumerate(schedule.table)
    table = tuple(tuple(each for cell in row for each in single(rank, cell)) for rank, row in rows)
    return replace(schedule, table=table)
