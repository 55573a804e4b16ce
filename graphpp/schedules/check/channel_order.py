"""Check the sends and receives of a table: none missing or left over, each on the right side of its computation, in order.

Contract
    in    a `ScheduleUnderCheck` with `where` filled, of a schedule with communication
    out   nothing; or `ScheduleError` at the send or receive that is missing, left over or out of order

A channel is an ordered pair of ranks. Its messages arrive in the order in which they are posted, whatever their kind and
stage, so both ends must list them in the same order. The parts of a batch (P2P) are posted in the order they are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from graphpp.schedules.check.schedule_under_check import Crossing, Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import Action, computations


def check_messages(subject: ScheduleUnderCheck) -> None:
    """Raise unless the table has exactly the sends and receives that its placement of stages needs, each on the right side."""
    expected: set[Action] = set()
    for crossing in subject.messages:
        _check_message(subject, crossing)
        expected.update((crossing.send, crossing.receive))
    for leaf, place in subject.where.items():
        if leaf.is_communication and leaf not in expected:
            what = f"{leaf} has no stage on another rank at its other end"
            raise subject.refusal(place, what, "remove it: values cross only between neighbouring stages on two ranks")


def _check_message(subject: ScheduleUnderCheck, crossing: Crossing) -> None:
    made, send, receive = crossing
    reader = next(_readers(subject, receive))
    if send not in subject.where:
        what = f"{send} is missing from this rank, so the result of {made} never leaves it"
        raise subject.refusal(subject.where[made], what, f"add {send} after {made}")
    if receive not in subject.where:
        what = f"{receive} is missing from this rank, so {reader} would run on nothing"
        raise subject.refusal(subject.where[reader], what, f"add {receive} before {reader}")
    subject.check_before(made, send)
    subject.check_before(receive, reader)


def _readers(subject: ScheduleUnderCheck, receive: Action) -> Iterator[Action]:
    return (leaf for leaf in computations(receive) if leaf in subject.where)


def check_channels(subject: ScheduleUnderCheck) -> None:
    """Raise unless both ends of every channel list its messages in the same order."""
    position = {leaf: place for place, leaf in enumerate(subject.where)}  # includes the order of the parts of a batch
    rank_of = subject.schedule.rank_of_stage
    channels: dict[tuple[int, int], list[Crossing]] = defaultdict(list)
    for crossing in subject.messages:
        channels[rank_of[crossing.send.stage], rank_of[crossing.receive.stage]].append(crossing)
    for crossings in channels.values():
        crossings.sort(key=lambda crossing: position[crossing.send])
        for first, then in pairwise(crossings):
            if position[first.receive] > position[then.receive]:
                raise _misordered(subject, first, then)


def _misordered(subject: ScheduleUnderCheck, first: Crossing, then: Crossing) -> Exception:
    source, here = subject.where[first.send].rank, subject.where[then.receive]
    what = (
        f"{then.receive} stands before {first.receive} (column {subject.where[first.receive].column}), but rank {source} "
        f"sends {first.send} before {then.send} to rank {here.rank}, so each would get the other's values"
    )
    return subject.refusal(Position(*here), what, "receive in the order of the sends")
