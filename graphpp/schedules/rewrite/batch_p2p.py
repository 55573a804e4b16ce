"""Fuse sends and receives of a rank into batches (P2P), each posted in one call. `check` accepts the result.

A verb is named as in Megatron-LM's `p2p_communication`. It lists the kinds that may be in one batch, each at most once, and
says whether all of them must have the same peer rank. In the steady state of 1F1B one call replaces two:
    1RECV_F2 1B1 1SEND_B1 1F2   ->   1B1 (1RECV_F2;1SEND_B1)P2P 1F2
A receive may be delayed up to the computation that reads it, to join a send. A send may pass other messages, but no
computation. Under the verb `all` a send may also pass computations to join another send, and receives up to the next send may
be hoisted to it. Messages of one channel never pass each other. Batches are made rank by rank from left to right: each one that
fits and closes no cycle of waits (`graphpp.schedules.check.deadlock`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError
from typing import NamedTuple

from graphpp.arguments import ROWS, checked
from graphpp.errors import ScheduleError
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.p2p_batches import Batches, BatchNode, Channel, DynamicTopologicalOrder, readers
from graphpp.schedules.table.actions import SENDS, Action, Kind
from graphpp.schedules.table.schedule import SCHEDULE, Schedule


class Verb(NamedTuple):
    """The kinds allowed in one batch. `one_peer`: its messages have one peer rank. `wide`: messages move as under `all`."""

    kinds: frozenset[Kind]
    one_peer: bool
    wide: bool = False


VERBS: Mapping[str, Verb] = {
    "send_forward_recv_backward": Verb(frozenset({Kind.SEND_F, Kind.RECV_B}), True),
    "send_backward_recv_forward": Verb(frozenset({Kind.SEND_B, Kind.RECV_F}), True),
    "send_forward_recv_forward": Verb(frozenset({Kind.SEND_F, Kind.RECV_F}), False),
    "send_backward_recv_backward": Verb(frozenset({Kind.SEND_B, Kind.RECV_B}), False),
    "all": Verb(frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}), False, wide=True),
}
PAIRS = ("send_forward_recv_backward", "send_backward_recv_forward")
"""The verbs whose messages all have the same peer rank."""


@checked(ScheduleError, schedule=SCHEDULE, verbs=ROWS)
def batch_p2p(schedule: Schedule, verbs: Sequence[str] = PAIRS) -> Schedule:
    """The schedule with its sends and receives in batches, made verb by verb in the order given.

    Raises `ScheduleError` for an unknown verb, or if `schedule` has a deadlock already.
    """
    unknown = [verb for verb in verbs if verb not in VERBS]
    if unknown:
        raise ScheduleError(f"unknown verb {unknown[0]!r}; take {', '.join(VERBS)}")
    if not schedule.has_communication:
        schedule = add_send_recv(schedule)
    rows = [Batches(rank, row, schedule.rank_of_stage) for rank, row in enumerate(schedule.table)]
    try:
        order = DynamicTopologicalOrder(edge for row in rows for edge in row.edges())
    except CycleError:
        raise ScheduleError(f"{schedule.name} has a deadlock before anything is fused; `check` names the cycle") from None
    for verb in verbs:
        for row in rows:
            _fuse(row, VERBS[verb], order)
    return replace(schedule, table=tuple(row.cells() for row in rows))


def _fuse(rank: Batches, verb: Verb, order: DynamicTopologicalOrder[BatchNode]) -> None:
    for start in list(rank.places):
        at: int | None = start
        while at is not None and at in rank.columns:
            at = _grow(rank, at, verb, order)


def _grow(rank: Batches, at: int, verb: Verb, order: DynamicTopologicalOrder[BatchNode]) -> int | None:
    """Join the messages at `at` with the next ones that fit; returns their new column, or None if none fit."""
    for other, place in _reachable(rank, at, verb):
        source = at if place == other else other
        if _fit(rank, rank.leaves(at) + rank.leaves(other), verb) and rank.join(source, place, order):
            return place
    return None


def _reachable(rank: Batches, at: int, verb: Verb) -> Iterator[tuple[int, int]]:
    """(column of other messages, column to meet at), for every batch with which the messages at `at` can be joined."""
    mine, later, crossed = rank.leaves(at), True, set[Channel]()
    for column in range(at + 1, len(rank.row)):
        action = rank.row[column]
        if column in rank.columns:
            other = rank.leaves(column)
            if later:
                yield column, column
            elif not _sends(other) and not crossed & rank.channels(other):
                yield column, at
            crossed |= rank.channels(other)
            later = later and not rank.channels(mine) & rank.channels(other)
            wide = verb.wide and not _sends(other)
        elif action is not None and not action.is_communication:
            later, wide = later and _may_pass(mine, action, verb), verb.wide
        if not later and not wide:
            return


def _fit(rank: Batches, leaves: Sequence[Action], verb: Verb) -> bool:
    """Whether these messages may form one batch under the verb."""
    kinds = {leaf.kind for leaf in leaves}
    fit = len(kinds) == len(leaves) and kinds <= verb.kinds and bool(kinds & SENDS)
    return fit and (not verb.one_peer or len({rank.peer(leaf) for leaf in leaves}) == 1)


def _sends(leaves: Sequence[Action]) -> bool:
    return any(leaf.kind in SENDS for leaf in leaves)


def _may_pass(messages: Sequence[Action], computation: Action, verb: Verb) -> bool:
    """Whether the messages may be delayed past the computation."""
    read = {reader for leaf in messages for reader in readers(leaf)}
    return (verb.wide or not _sends(messages)) and read.isdisjoint(computation.leaves)
