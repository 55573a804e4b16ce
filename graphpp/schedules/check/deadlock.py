"""Proves that a table comes to its end: no action of it waits, through others, for itself.

Contract
    in    a `Case` whose actions are in place, with either all of its sends and receives or none
    out   nothing; or `ScheduleError` with the cycle of waits, one wait a line

The proof is one graph. Its nodes are the computations and the messages; a message, its send and its receive, is ONE
node (rendezvous: it is over when both ends have come to it). A computation waits for the one before it on its rank and
for what it reads. A message waits, on both of its ranks, for the computation before it and for the sends and receives
before it. Those of a batch (P2P) are under way together, so none waits for another; but they are over together: who
reads one, or comes after it, waits for all of them.

That is the strictest transport there is: NCCL's batched point-to-point, one communicator and stream per rank, nothing
buffered. Each laxer one has fewer waits: a communicator per pair of ranks, which is NCCL unbatched; receives that are
posted early and waited for when read; a transport where up to `transport.DEPTH` sends to a rank are under way before
the next one waits for the oldest (the proof holds for a depth of 0, and so for any); gloo, which may buffer a send. So
no cycle here means no hang on any of them. UNSHARD, RESHARD and REDUCE_GRAD wait for replicas of the same stage, which
run the same table, and so for no other rank of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from graphpp.schedules.check.case import Case, Place
from graphpp.schedules.table.actions import Action, Kind, message, upstream

Node = Place | Action
"""A computation's cell, or a message, by its send."""


def check_progress(case: Case) -> None:
    """Raise `ScheduleError`, which shows the cycle, where actions wait for each other."""
    cycle = find_cycle(case)
    if cycle:
        places = _Places.of(case)
        shown = _without_steps(cycle, places)
        lines = [f"    {_wait(case, places, *hop)}" for hop in pairwise([*shown, shown[0]])]
        note = " (a message is over when both of its ends have come to it)" if case.schedule.has_communication else ""
        remedy = "\n".join(["reorder one of these ranks so that the cycle opens", *lines])
        what = f"deadlock, each of these waits for the next{note}"
        raise case.refusal(places.cells(shown[0])[0], what, remedy)


def find_cycle(case: Case) -> list[Node]:
    """Nodes each of which waits for the next, and the last for the first; empty where everything comes to its end."""
    try:
        TopologicalSorter(waits(case)).prepare()
    except CycleError as fault:
        nodes: list[Node] = fault.args[1]  # graphlib lists each node before the one that waits for it
        return nodes[:0:-1]
    return []


# ---------------------------------------------------------------------------------- the graph of waits


@dataclass
class _Rank:
    """The last things on a rank's list so far."""

    computation: list[Node] = field(default_factory=list)
    messages: list[Node] = field(default_factory=list)


def waits(case: Case) -> dict[Node, set[Node]]:
    """Each node -> the nodes that must be over before it."""
    send_of = {receive: send for _, send, receive in case.messages} if case.schedule.has_communication else {}
    graph: dict[Node, set[Node]] = {}
    last = [_Rank() for _ in case.schedule.table]
    for rank, column, action in case.schedule.cells():
        before = last[rank]
        if action.is_communication:
            nodes: list[Node] = [send_of.get(leaf, leaf) for leaf in action.leaves]
            for node in nodes:
                graph.setdefault(node, set()).update(before.computation, before.messages)
            before.messages = nodes
        else:
            here = Place(rank, column)
            graph[here] = {*before.computation, *_read(case, action, send_of)}
            before.computation = [here]
    return graph


def _read(case: Case, action: Action, send_of: dict[Action, Action]) -> Iterator[Node]:
    """What a computation's inputs come with: a neighbour's computation, or the messages that arrive with them."""
    for leaf in action.leaves:
        for maker in upstream(leaf, case.stages):
            if maker in case.where:
                pair = message(maker, case.stages)
                if pair is None or pair[1] not in send_of:
                    yield case.where[maker]
                else:
                    batch = case.at(case.where[pair[1]])
                    yield from (send_of.get(each, each) for each in (batch.leaves if batch else ()))


# ---------------------------------------------------------------------------------- a cycle, as text


@dataclass(frozen=True)
class _Places:
    """Where nodes stand, for a person."""

    case: Case
    receive_of: dict[Action, Action]

    @classmethod
    def of(cls, case: Case) -> _Places:
        return cls(case, {send: receive for _, send, receive in case.messages})

    def cells(self, node: Node) -> tuple[Place, ...]:
        """The cell of a computation; those of a message's send and receive."""
        if isinstance(node, Place):
            return (node,)
        return self.case.where[node], self.case.where[self.receive_of[node]]


def _without_steps(cycle: list[Node], places: _Places) -> list[Node]:
    """Leave out the nodes in the middle of a run of earlier and earlier cells of one rank."""

    def passed_by(around: Iterable[Node]) -> bool:
        before, node, after = (places.cells(each)[0] for each in around)
        return before.rank == node.rank == after.rank and before.column > node.column > after.column

    around = zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False)
    return [nodes[1] for nodes in around if not passed_by(nodes)]


def _wait(case: Case, places: _Places, waiter: Node, waited: Node) -> str:
    reads = isinstance(waiter, Place) and isinstance(waited, Action)
    cells = [(one, two) for one in places.cells(waiter) for two in places.cells(waited)]
    after = any(one.rank == two.rank and one.column > two.column for one, two in cells)
    verb = "comes after" if after and not reads else "waits for"
    return f"{_name(case, places, waiter)} {verb} {_name(case, places, waited)}"


def _name(case: Case, places: _Places, node: Node) -> str:
    if isinstance(node, Place):
        return f"{case.at(node)} (rank {node.rank}, column {node.column})"
    ends = (node, places.receive_of[node])
    return " -> ".join(_end(case, action, place) for action, place in zip(ends, places.cells(node), strict=True))


def _end(case: Case, action: Action, place: Place) -> str:
    whole = case.at(place)
    batch = " of a batch" if whole is not None and whole.kind is Kind.P2P else ""
    return f"{action} (rank {place.rank}, column {place.column}{batch})"
