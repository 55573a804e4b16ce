"""Adds the sends and receives to a compute-only schedule, as a pass over the table.

Contract
    Wherever neighbouring stages stand on different ranks, each F is followed by its SEND_F and each B or I by its
    SEND_B, and the RECV is put into the other rank's list at the same moment. So the pairs are events in one total
    order that both ends agree on: each rank's list is that order with the events of others left out, and no two
    ranks can wait for each other, also where a send blocks until it is received, also when neighbours send to
    each other. Order of computations is untouched; idle cells are dropped, since columns are no longer time.

        r0 0F0 0F1 .   0B0 0B1          r0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        r1 .   1F0 1B0 1F1 1B1   ->     r1 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    The result is that of torch's `_add_send_recv` on the same lists.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, message, upstream
from graphpp.schedules.table.schedule import Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B; a single rank needs none and only loses idle cells.

    Raises `ScheduleError` if there are sends or receives already, or if no order of execution exists (then
    `checker.check` tells the cycle).
    """
    if schedule.has_communication:
        raise ScheduleError(f"{schedule.name} has sends and receives already; run it as it is, or take them out")
    ranks = [_Rank(deque(action for action in row if action)) for row in schedule.table]
    while any(rank.todo for rank in ranks):
        # A list, not a generator: every rank gets its turn in every round.
        if not any([_advance(rank, ranks, schedule) for rank in ranks]):
            stuck = ", ".join(f"rank {number}: {rank.todo[0]}" for number, rank in enumerate(ranks) if rank.todo)
            raise ScheduleError(f"{schedule.name} cannot run to its end, it stops at {stuck}; `check` names the cycle")
    table = tuple(tuple(rank.done) for rank in ranks)
    return replace(schedule, table=table)


@dataclass
class _Rank:
    todo: deque[Action]
    done: list[Action] = field(default_factory=list)
    values: set[Action] = field(default_factory=set)
    """Computations whose results are on this rank, because they ran here or have arrived."""


def _advance(rank: _Rank, ranks: list[_Rank], schedule: Schedule) -> bool:
    """Run the rank's next action if what it reads is there, and deliver what it makes."""
    if not rank.todo or not all(_ready(leaf, rank, schedule.stages) for leaf in rank.todo[0].leaves):
        return False
    action = rank.todo.popleft()
    rank.done.append(action)
    for leaf in action.leaves:
        rank.values.add(leaf)
        _deliver(leaf, rank, ranks, schedule)
    return True


def _ready(leaf: Action, rank: _Rank, stages: int) -> bool:
    makers = upstream(leaf, stages)
    return not makers or any(maker in rank.values for maker in makers)


def _deliver(leaf: Action, rank: _Rank, ranks: list[_Rank], schedule: Schedule) -> None:
    pair = message(leaf, schedule.stages)
    if pair is None:
        return
    send, receive = pair
    where = schedule.rank_of_stage.get(receive.stage)
    if where is None or ranks[where] is rank:
        return
    rank.done.append(send)
    ranks[where].done.append(receive)
    ranks[where].values.add(leaf)
