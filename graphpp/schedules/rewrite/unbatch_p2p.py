"""Split batches (P2P) into single sends and receives, for a transport that posts messages, or blocks on them, one by one.

`check` accepts the result if it accepted the batches: no order of calls hangs, even if each send blocks until it is received.
    r0 (0SEND_F1;0RECV_B0)P2P        r0 0SEND_F1 0RECV_B0
    r1 (1RECV_F1;1SEND_B0)P2P   ->   r1 1RECV_F1 1SEND_B0
Even ranks post a batch's sends before its receives, odd ranks its receives before its sends, so that of two neighbours one
receives while the other sends. That order can hang if two ranks that exchange are both even or both odd, or if the other end of
a message is in a batch of other messages. Then all ranks follow one total order of the messages: an order in which the batched
table can run, with messages of even ranks first if there is a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import count

from graphpp.arguments import checked
from graphpp.errors import ScheduleError
from graphpp.schedules.check.deadlock import WaitNode, find_cycle, waits
from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import SENDS, Action, Kind, send_of
from graphpp.schedules.table.schedule import SCHEDULE, Schedule

SortKey = Callable[[int, Action], int]


@checked(ScheduleError, schedule=SCHEDULE)
def unbatch_p2p(schedule: Schedule) -> Schedule:
    """The schedule without batches; sends and receives outside of batches stay in place."""
    apart = _apart(schedule, lambda rank, leaf: int((leaf.kind in SENDS) == bool(rank % 2)))
    return _apart(schedule, _by_order(schedule)) if find_cycle(ScheduleUnderCheck.of(apart)) else apart


def _by_order(schedule: Schedule) -> SortKey:
    """The position of a message in one total order in which the messages can end one at a time."""
    subject = ScheduleUnderCheck.of(schedule)
    place = {node: number for number, node in enumerate(_one_at_a_time(subject))}
    return lambda rank, leaf: place[send_of(leaf)]


def _one_at_a_time(subject: ScheduleUnderCheck) -> Iterator[WaitNode]:
    """All nodes in topological order; of the nodes ready at once, computations come first, then messages of even ranks."""
    graph = TopologicalSorter(waits(subject))
    graph.prepare()
    ready: list[tuple[int, int, WaitNode]] = []
    tie = count()
    while graph.is_active():
        for node in graph.get_ready():
            urgency = 0 if isinstance(node, Position) else 1 + subject.where[node].rank % 2
            heappush(ready, (urgency, next(tie), node))
        _, _, node = heappop(ready)
        graph.done(node)
        yield node


def _apart(schedule: Schedule, key: SortKey) -> Schedule:
    def single(rank: int, cell: Action | None) -> Sequence[Action | None]:
        if cell is None or cell.kind is not Kind.P2P:
            return [cell]
        return sorted(cell.parts, key=lambda leaf: key(rank, leaf))

    rows = enumerate(schedule.table)
    table = tuple(tuple(each for cell in row for each in single(rank, cell)) for rank, row in rows)
    return replace(schedule, table=table)
