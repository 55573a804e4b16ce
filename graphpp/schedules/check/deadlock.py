"""Prove that a table runs to its end: no action waits, through others, for itself.

- In: a `ScheduleUnderCheck` with `where` filled, with all of its sends and receives or none. `ScheduleError` shows the cycle of
  waits.
- The proof is one graph of the computations and the messages. A message, with its send and its receive, is one node: it ends
  when both ranks have reached it. A computation waits for the previous computation on its rank and for its inputs. A message
  waits, on both of its ranks, for the previous computation and messages. The messages of a batch (P2P) run and end together: a
  computation that reads one of them, or a message after the batch, waits for all of them.
- This models the strictest transport: NCCL's batched point-to-point, one communicator and stream per rank, no buffering. Every
  other transport has fewer waits (a communicator per pair of ranks, receives posted early, sends in flight, buffers), so a
  table without a cycle hangs on none of them. UNSHARD, RESHARD and REDUCE_GRAD wait for the replicas of the same stage, which
  run the same table, and so for no other rank of this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import Action, message, peer, send_of, upstream

WaitNode = Position | Action
"""The cell of a computation, or a message named by its send."""


def check_progress(subject: ScheduleUnderCheck) -> None:
    """Raise `ScheduleError` showing the cycle if actions wait for each other."""
    cycle = find_cycle(subject)
    if cycle:
        shown = _without_steps(subject, cycle)
        lines = [f"    {_wait(subject, *hop)}" for hop in pairwise([*shown, shown[0]])]
        note = " (a message is over when both of its ends have come to it)" if subject.schedule.has_communication else ""
        remedy = "\n".join(["reorder one of these ranks so that the cycle opens", *lines])
        what = f"deadlock, each of these waits for the next{note}"
        raise subject.refusal(_cells(subject, shown[0])[0], what, remedy)


def find_cycle(subject: ScheduleUnderCheck) -> list[WaitNode]:
    """Nodes each of which waits for the next, and the last for the first; empty if the table runs to its end."""
    try:
        TopologicalSorter(waits(subject)).prepare()
    except CycleError as fault:
        nodes: list[WaitNode] = fault.args[1]  # graphlib lists each node before the one that waits for it
        return nodes[:0:-1]
    return []


def waits(subject: ScheduleUnderCheck) -> dict[WaitNode, set[WaitNode]]:
    """The graph of waits: each node -> the nodes that must have ended before it."""
    graph: dict[WaitNode, set[WaitNode]] = {}
    for rank, row in enumerate(subject.schedule.table):
        computation, messages = list[WaitNode](), list[WaitNode]()  # for which the next action of the rank waits
        for column, action in enumerate(row):
            if action is not None and action.is_communication:
                nodes: list[WaitNode] = [send_of(leaf) for leaf in action.leaves]
                for node in nodes:
                    graph.setdefault(node, set()).update(computation, messages)
                messages = nodes
            elif action is not None:
                here = Position(rank, column)
                graph[here] = {*computation, *_nodes_read(subject, action)}
                computation = [here]
    return graph


def _nodes_read(subject: ScheduleUnderCheck, action: Action) -> Iterator[WaitNode]:
    """The nodes that supply a computation's inputs: a neighbour's computation, or all messages of the batch with the input."""
    for leaf in action.leaves:
        for maker in upstream(leaf, subject.stages):
            if maker in subject.where:
                pair = message(maker, subject.stages)
                if pair is None or pair[1] not in subject.where:
                    yield subject.where[maker]
                else:
                    batch = subject.at(subject.where[pair[1]])
                    yield from map(send_of, batch.leaves if batch else ())


def _cells(subject: ScheduleUnderCheck, node: WaitNode) -> tuple[Position, ...]:
    """The cell of a computation; of a message, the cells of its send and its receive."""
    return (node,) if isinstance(node, Position) else (subject.where[node], subject.where[peer(node)])


def _without_steps(subject: ScheduleUnderCheck, cycle: list[WaitNode]) -> list[WaitNode]:
    """Drop the inner nodes of a run of waits that only walks back along one rank's row."""

    def passed_by(around: Iterable[WaitNode]) -> bool:
        before, node, after = (_cells(subject, each)[0] for each in around)
        return before.rank == node.rank == after.rank and before.column > node.column > after.column

    around = zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False)
    return [nodes[1] for nodes in around if not passed_by(nodes)]


def _wait(subject: ScheduleUnderCheck, waiter: WaitNode, waited: WaitNode) -> str:
    reads = isinstance(waiter, Position) and isinstance(waited, Action)
    cells = [(one, two) for one in _cells(subject, waiter) for two in _cells(subject, waited)]
    after = any(one.rank == two.rank and one.column > two.column for one, two in cells)
    verb = "comes after" if after and not reads else "waits for"
    return f"{_name(subject, waiter)} {verb} {_name(subject, waited)}"


def _name(subject: ScheduleUnderCheck, node: WaitNode) -> str:
    if isinstance(node, Position):
        return f"{subject.at(node)} (rank {node.rank}, column {node.column})"
    ends = []
    for action, place in zip((node, peer(node)), _cells(subject, node), strict=True):
        batch = " of a batch" if subject.at(place) != action else ""
        ends.append(f"{action} (rank {place.rank}, column {place.column}{batch})")
    return " -> ".join(ends)
