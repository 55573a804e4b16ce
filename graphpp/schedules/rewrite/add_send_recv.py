"""Add the sends and receives to a compute-only schedule. The result equals that of torch's `_add_send_recv`.

If neighbouring stages are on different ranks, each F is followed by its SEND_F and each B or I by its SEND_B, and at the same
moment the RECV is appended to the other rank's row. So all messages have one total order, and no two ranks can wait for each
other, even if a send blocks until it is received. Computations keep their order; idle cells are dropped, since columns are no
longer time.
    r0 0F0 0F1 .   0B0 0B1          r0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    r1 .   1F0 1B0 1F1 1B1   ->     r1 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from graphpp.arguments import checked
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, message
from graphpp.schedules.table.in_order import Stuck, has_inputs, in_order
from graphpp.schedules.table.schedule import SCHEDULE, Schedule


@checked(ScheduleError, schedule=SCHEDULE)
def add_send_recv(schedule: Schedule) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B; a single rank needs none and only loses its idle cells.

    Raises `ScheduleError` if the schedule has communication already, or deadlocks (then `checker.check` names the cycle).
    """
    if schedule.has_communication:
        raise ScheduleError(f"{schedule.name} has sends and receives already; run it as it is, or take them out")
    rows = [[action for action in row if action] for row in schedule.table]
    ranks = [_RankLists() for _ in rows]
    try:
        for rank, action in in_order(rows, lambda rank, action: has_inputs(action, ranks[rank].results, schedule.stages)):
            ranks[rank].actions.append(action)
            for leaf in action.leaves:
                ranks[rank].results.add(leaf)
                _deliver(leaf, rank, ranks, schedule)
    except Stuck as fault:
        stops = ", ".join(f"rank {rank}: {action}" for rank, action in fault.heads.items())
        raise ScheduleError(f"{schedule.name} cannot run to its end, it stops at {stops}; `check` names the cycle") from None
    return replace(schedule, table=tuple(tuple(rank.actions) for rank in ranks))


@dataclass
class _RankLists:
    """`results`: the computations whose results are on this rank, because they ran here or were received."""

    actions: list[Action] = field(default_factory=list)
    results: set[Action] = field(default_factory=set)


def _deliver(leaf: Action, rank: int, ranks: list[_RankLists], schedule: Schedule) -> None:
    """Send the result of `leaf` to the rank of the neighbouring stage, if that is another rank."""
    ends = message(leaf, schedule.stages)
    other = schedule.rank_of_stage.get(ends[1].stage) if ends else None
    if ends and other is not None and other != rank:
        send, receive = ends
        ranks[rank].actions.append(send)
        ranks[other].actions.append(receive)
        ranks[other].results.add(leaf)
