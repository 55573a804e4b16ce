"""Post receives before their place in the table, so that messages travel while the rank computes.

A receive comes right before the computation that reads the `ahead`-th previous receive from the same rank
(`MessageFlow.ahead`), or stays if its place is earlier. No other action moves, and batches (P2P) stay. Receives from one rank
keep their order, so each message meets its buffer; each sending rank has at most `ahead` more buffers. On gloo an early irecv
never blocks, so the deadlock proof of the original table holds. On NCCL the messages of a pair of ranks, both ways, run in the
order in which they are posted, so a receive posted before a send delays that send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from graphpp.schedules.table.actions import Action, Kind, computations, peer
from graphpp.schedules.table.schedule import Schedule

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass
class _Channel:
    """The receives from one rank so far. `readers`: the columns of the computations that read them.

    `earliest`: the lowest column to which the next receive may be hoisted without overtaking a receive that stays in place.
    """

    readers: list[int] = field(default_factory=list)
    earliest: int = 0

    def post(self, at: int, reader: int, ahead: int, *, stays: bool) -> int:
        """The column to which the receive at column `at` is hoisted; `reader`: the column of the computation that reads it."""
        free = self.readers[-ahead] if len(self.readers) >= ahead else 0
        moved = at if stays else min(at, max(self.earliest, free))
        self.earliest = moved + stays  # at one column hoisted receives come before an action that stays
        self.readers.append(reader)
        return moved


def hoist_receives(schedule: Schedule, ahead: int) -> Schedule:
    """The table with its receives posted up to `ahead` messages before they are read; 0: each in its place."""
    if not ahead or not schedule.has_communication:
        return schedule
    where = schedule.rank_of_stage
    rows = tuple(tuple(_hoisted((action for action in row if action is not None), where, ahead)) for row in schedule.table)
    return replace(schedule, table=rows)


def _hoisted(row: Iterable[Action], rank_of_stage: Mapping[int, int], ahead: int) -> list[Action]:
    actions = list(row)
    column = {leaf: at for at, action in enumerate(actions) for leaf in action.leaves}
    channels: dict[int, _Channel] = defaultdict(_Channel)
    moved: list[list[Action]] = [[] for _ in actions]
    for at, action in enumerate(actions):
        to = at
        for leaf in (leaf for leaf in action.leaves if leaf.kind in _RECEIVES):
            source = rank_of_stage[peer(leaf).stage]
            reader = next(column[each] for each in computations(leaf) if each in column)
            to = channels[source].post(at, reader, ahead, stays=bool(action.parts))
        moved[to].append(action)
    return [action for each in moved for action in sorted(each, key=lambda one: one.kind not in _RECEIVES)]
