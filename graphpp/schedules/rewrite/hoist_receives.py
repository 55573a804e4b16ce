"""Receives posted before they stand in the table, so that values travel while a rank computes.

Contract
    in    a rank's list of a checked table, and how many messages from one rank may be posted ahead
    out   the same actions; a receive stands where the reader of the `ahead`-th receive before it from the same rank
          stands, or where it stood if that comes first. Nothing else moves, nor do batches (P2P)

Receives from one rank keep their order, so each message still meets its buffer. Where a receive that is posted waits for
nobody, as on gloo, the run has no wait that the table does not have, so what `deadlock.py` proves of the table holds. NCCL
is another matter: the messages of a pair of ranks, both ways, run in the order in which they are posted, and a receive
that is posted before a send holds it up.

At most `ahead` buffers for each sending rank are held that the table would not hold yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graphpp.schedules.table.actions import Action, Kind, computations, peer

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass
class _Channel:
    """The receives from one rank so far: where their readers stand, and before what the next one may be posted at most."""

    readers: list[int] = field(default_factory=list)
    earliest: int = 0

    def post(self, at: int, reader: int, ahead: int, *, stays: bool) -> int:
        """Where the receive that stands at `at` is posted."""
        free = self.readers[-ahead] if len(self.readers) >= ahead else 0
        moved = at if stays else min(at, max(self.earliest, free))
        self.earliest = moved + stays  # what is moved to a place comes before what stays there
        self.readers.append(reader)
        return moved


def hoist_receives(row: Iterable[Action], rank_of_stage: Mapping[int, int], ahead: int) -> list[Action]:
    """The list with its receives posted up to `ahead` (at least 1) messages before they are read."""
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
