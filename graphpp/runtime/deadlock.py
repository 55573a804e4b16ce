"""Proves that a table comes to its end: no action of it waits, through others, for itself.

Contract
    in    a `Case` whose actions are in place, with either all of its sends and receives or none
    out   nothing; or `ScheduleError` with the cycle of waits, one wait a line

The proof is one graph. Its nodes are the cells, a send and its receive being ONE node (rendezvous: a message is over
when both ends have come to it). A cell waits for the computation before it on its rank and for what it reads; a
message also waits for the message before it on either rank. That is the strictest transport there is (NCCL's batched
point-to-point: one communicator and stream per rank, nothing buffered); each laxer one (a communicator per pair,
gloo's eager sends) has fewer waits. So no cycle here means no hang on any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from graphpp.runtime.actions import SENDS, Action, message, upstream
from graphpp.runtime.case import Case, Place


def check_progress(case: Case) -> None:
    """Raise `ScheduleError`, which shows the cycle, where actions wait for each other."""
    try:
        TopologicalSorter(_waits(case)).prepare()
    except CycleError as fault:
        # graphlib lists each node before the one that waits for it; read backwards, each waits for the next.
        cycle = _without_steps(fault.args[1][:0:-1])
        lines = [f"    {_wait(case, *hop)}" for hop in pairwise([*cycle, cycle[0]])]
        note = " (a message is over when both of its ends have come to it)" if case.schedule.has_communication else ""
        remedy = "\n".join(["reorder one of these ranks so that the cycle opens", *lines])
        raise case.refusal(cycle[0], f"deadlock, each of these waits for the next{note}", remedy) from None


# ---------------------------------------------------------------------------------- the graph of waits


def _waits(case: Case) -> dict[Place, set[Place]]:
    """Each cell -> the cells that must be over before it; a receive stands for itself at the place of its send."""
    send_of: dict[Place, Place] = {}
    if case.schedule.has_communication:
        send_of = {case.where[receive]: case.where[send] for _, send, receive in case.messages()}
    graph: dict[Place, set[Place]] = {}
    last: dict[tuple[int, bool], Place] = {}
    for rank, column, action in case.schedule.cells():
        here = Place(rank, column)
        sides = {(rank, False), (rank, action.is_communication)}
        before = [*(last[side] for side in sides if side in last), *_read(case, action)]
        graph.setdefault(send_of.get(here, here), set()).update(send_of.get(place, place) for place in before)
        last[rank, action.is_communication] = here
    return graph


def _read(case: Case, action: Action) -> Iterator[Place]:
    """The places a computation's inputs come from: a neighbour's computation, or the message that carries it."""
    for leaf in action.leaves:
        for maker in upstream(leaf, case.stages):
            if maker in case.where:
                pair = message(maker, case.stages)
                yield case.where.get(pair[0], case.where[maker]) if pair else case.where[maker]


# ---------------------------------------------------------------------------------- a cycle, as text


def _without_steps(cycle: list[Place]) -> list[Place]:
    """Leave out the nodes in the middle of a run of earlier and earlier cells of one rank."""

    def passed_by(before: Place, node: Place, after: Place) -> bool:
        return before.rank == node.rank == after.rank and before.column > node.column > after.column

    around = zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False)
    return [node for before, node, after in around if not passed_by(before, node, after)]


def _wait(case: Case, waiter: Place, waited: Place) -> str:
    order = waiter.rank == waited.rank and waiter.column > waited.column
    return f"{_name(case, waiter)} {'comes after' if order else 'waits for'} {_name(case, waited)}"


def _name(case: Case, place: Place) -> str:
    action = case.at(place)
    text = f"{action} (rank {place.rank}, column {place.column})"
    if action is None or action.kind not in SENDS:
        return text
    _, receive = next((send, receive) for _, send, receive in case.messages() if send == action)
    other = case.where[receive]
    return f"{text} -> {receive} (rank {other.rank}, column {other.column})"
