"""Accept a correct table quickly: every rule of `graphpp.schedules.check.checker`, on arrays instead of action by action.

Contract
    `is_valid` returns True only for a table that keeps all rules. False says no more than that a rule may be broken; the
    functions of `checker.py` then find the fault and its text. The rules stand here in the order of `checker.py`; the last
    one, that no action waits for itself, is in `graphpp.schedules.check.vectorized_waits`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphpp.schedules.check.leaf_arrays import CODE, NO_MICROBATCH, Flags, Integers, LeafArrays, leaf_arrays
from graphpp.schedules.check.vectorized_waits import runs_to_its_end
from graphpp.schedules.table.actions import BACKWARDS, COMMUNICATION, PER_STAGE, WITH_PARTS, Kind
from graphpp.schedules.table.schedule import Schedule

_ABSENT = -1
_COMPUTATIONS = (Kind.F, *BACKWARDS)
_MESSAGES = tuple(COMMUNICATION - set(WITH_PARTS))


def is_valid(schedule: Schedule, stages: int, microbatches: int, *, training: bool) -> bool:
    """Whether a table keeps every rule for these counts, as far as arrays can tell; False also where they cannot."""
    leaves = leaf_arrays(schedule)
    if leaves is None or (schedule.stages, schedule.microbatches) != (stages, microbatches):
        return False
    if any(stage >= stages or microbatch >= microbatches for stage, microbatch in schedule.recomputed or ()):
        return False
    if not _each_in_range(leaves, stages, microbatches, training):
        return False
    entries = _Entries(leaves, stages, microbatches)
    if not (entries.each_once() and entries.in_order(training) and _shards_in_order(leaves, stages)):
        return False
    values = entries.values(training)
    crossing = leaves.rank[values.made] != leaves.rank[values.read]
    local, sent = values.where(~crossing), values.where(crossing)
    if not schedule.has_communication:
        return runs_to_its_end(leaves, values.made, values.read)
    return _messages_in_order(leaves, sent) and runs_to_its_end(leaves, local.made, local.read, *sent[1:])


# ---------------------------------------------------------------------------------- each action


def _each_in_range(leaves: LeafArrays, stages: int, microbatches: int, training: bool) -> bool:
    """Stages and microbatches in range, no backward in a table of forwards, all actions of a stage on one rank."""
    given = (leaves.microbatch >= 0) & (leaves.microbatch < microbatches)
    fits = np.where(leaves.of_kind(*PER_STAGE), leaves.microbatch == NO_MICROBATCH, given)
    fits &= (leaves.stage >= 0) & (leaves.stage < stages)
    if not training:
        fits &= leaves.of_kind(Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
    if not fits.all():
        return False
    home = np.zeros(stages, dtype=np.int32)
    home[leaves.stage] = leaves.rank
    return bool((home[leaves.stage] == leaves.rank).all())


class _Values(NamedTuple):
    """For each value that passes to a neighbouring stage the entries of its maker, its send and receive, and its reader.

    `send` and `receive` are -1 where the table lacks them.
    """

    made: Integers
    send: Integers
    receive: Integers
    read: Integers

    def where(self, chosen: Flags) -> _Values:
        """The values for which `chosen` is True."""
        return _Values(*(each[chosen] for each in self))


class _Entries:
    """The entry of each (kind, stage, microbatch) of a table whose actions are all in range."""

    def __init__(self, leaves: LeafArrays, stages: int, microbatches: int) -> None:
        self._leaves = leaves
        self._listed = np.flatnonzero(~leaves.of_kind(*PER_STAGE))
        self._table = np.full((len(CODE), stages, microbatches), _ABSENT, dtype=np.int32)
        which = (each[self._listed] for each in (leaves.kind, leaves.stage, leaves.microbatch))
        self._table[tuple(which)] = self._listed

    def of(self, kind: Kind) -> Integers:
        """The entries of a kind, stage by microbatch; -1 where the table has none."""
        found: Integers = self._table[CODE[kind]]
        return found

    def each_once(self) -> bool:
        """Whether no action stands twice, but for UNSHARD and RESHARD."""
        reduced = self._leaves.stage[self._leaves.of_kind(Kind.REDUCE_GRAD)]
        return np.count_nonzero(self._table != _ABSENT) == len(self._listed) and len(np.unique(reduced)) == len(reduced)

    def in_order(self, training: bool) -> bool:
        """Whether each F is there and, in training, a later B, or a later I and a W after it; REDUCE_GRAD after these."""
        f, b, i, w = (self.of(kind) for kind in _COMPUTATIONS)
        whole, inputs, weights = (each != _ABSENT for each in (b, i, w))
        if not (f != _ABSENT).all():
            return False
        if not training:
            return True
        if not ((whole ^ inputs) & (inputs == weights)).all():
            return False
        reductions = np.flatnonzero(self._leaves.of_kind(Kind.REDUCE_GRAD))
        last = np.maximum(b, w).max(axis=1, initial=_ABSENT)[self._leaves.stage[reductions]]
        pairs = ((f, np.maximum(b, i)), (i[inputs], w[inputs]), (last, reductions))
        return all(_in_later_column(self._leaves, *each) for each in pairs)

    def values(self, training: bool) -> _Values:
        """Every value that passes to a neighbouring stage: activations upwards and, in training, gradients downwards."""
        f, b = self.of(Kind.F), np.maximum(self.of(Kind.B), self.of(Kind.I))
        passed = [(f[:-1], self.of(Kind.SEND_F)[:-1], self.of(Kind.RECV_F)[1:], f[1:])]
        if training:
            passed.append((b[1:], self.of(Kind.SEND_B)[1:], self.of(Kind.RECV_B)[:-1], b[:-1]))
        return _Values(*(np.concatenate([each.ravel() for each in side]) for side in zip(*passed, strict=True)))


def _in_later_column(leaves: LeafArrays, first: Integers, then: Integers) -> bool:
    """Whether each of `then` stands in a later column than the entry of `first` beside it."""
    return bool((leaves.column[first] < leaves.column[then]).all())


# ---------------------------------------------------------------------------------- messages and shards


def _messages_in_order(leaves: LeafArrays, sent: _Values) -> bool:
    """Whether the table has the messages of `sent` alone, each on its side, in one order at both ends of a channel."""
    listed = np.count_nonzero(leaves.of_kind(*_MESSAGES))
    if (sent.send == _ABSENT).any() or (sent.receive == _ABSENT).any() or listed != 2 * len(sent.send):
        return False
    if not (_in_later_column(leaves, sent.made, sent.send) and _in_later_column(leaves, sent.receive, sent.read)):
        return False
    channel = leaves.rank[sent.send] * np.int64(1 + leaves.rank.max(initial=0)) + leaves.rank[sent.receive]
    by_send = np.lexsort((sent.send, channel))
    same_channel = np.diff(channel[by_send]) == 0
    return bool((np.diff(sent.receive[by_send])[same_channel] > 0).all())


def _shards_in_order(leaves: LeafArrays, stages: int) -> bool:
    """Whether a stage's UNSHARD and RESHARD alternate, UNSHARD first and RESHARD last, with each computation between them."""
    opens, closes = leaves.of_kind(Kind.UNSHARD), leaves.of_kind(Kind.RESHARD)
    sharded = np.zeros(stages, dtype=np.bool_)
    sharded[leaves.stage[opens | closes]] = True
    entries = np.flatnonzero(sharded[leaves.stage] & (opens | closes | leaves.of_kind(*_COMPUTATIONS)))
    by_stage = entries[np.argsort(leaves.stage[entries], kind="stable")]
    change = opens[by_stage].astype(np.int64) - closes[by_stage]
    whole = np.cumsum(change)  # of one stage after the other: each ends at 0, so that the next starts at 0
    last = np.diff(leaves.stage[by_stage], append=stages) != 0
    return bool((whole == (change >= 0)).all() and (whole[last] == 0).all())
