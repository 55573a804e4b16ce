"""Messages that occupy ranks (`Costs.blocking`) in the constraint model of `exact.py`.

Contract
    A SEND stands anywhere after the computation that makes its value, a RECV anywhere before the one that reads it, and both
    occupy their ranks as in the simulator. All messages have one total order, in which each rank has its sends and receives: so
    a solution is a table that `check` accepts, since no two ranks wait for each other even where a send waits for its receive.
    Batches of messages (P2P) are not in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ortools.sat.python import cp_model

from graphpp.schedules.table.actions import Action, Kind

Key = tuple[Kind, int, int]


@dataclass(frozen=True)
class Message:
    """A message to the computation `reader`. `send` and `receive`: when the message leaves, and when its RECV takes it.

    `ranks`: of the sender and of the receiver; `seconds`: its time.
    """

    reader: Key
    ranks: tuple[int, int]
    seconds: int
    send: Any
    receive: Any
    place: Any

    def ends(self) -> Iterator[tuple[int, Any]]:
        """Each rank that the message occupies, and since when."""
        yield from zip(self.ranks, (self.send, self.receive), strict=True)


class Messages:
    """The messages of a model."""

    def __init__(self, cp: cp_model.CpModel, overhead: int, horizon: int, most: int) -> None:
        self.cp, self.overhead, self.horizon, self.most = cp, overhead, horizon, most
        self.all: dict[Key, Message] = {}

    def add(self, reader: Key, ranks: tuple[int, int], seconds: int, made: Any, read: Any) -> Iterator[tuple[int, int, Any]]:
        """Add the message that is made at `made` and read at `read`: (rank, time, interval) of its SEND and of its RECV."""
        names = (f"send of {reader}", f"receive of {reader}")
        send, receive = (self.cp.new_int_var(self.overhead, self.horizon, name) for name in names)
        place = self.cp.new_int_var(0, self.most, f"place of {reader}")
        message = self.all[reader] = Message(reader, ranks, seconds, send, receive, place)
        self.cp.add(send >= made + self.overhead)
        self.cp.add(receive >= send)
        self.cp.add(read >= receive + seconds)
        for rank, start in message.ends():
            size = self.overhead + seconds
            yield rank, size, self.cp.new_interval_var(start - self.overhead, size, start + seconds, "")

    def put_in_one_order(self) -> None:
        """Of two messages that share a rank, one is before the other at all ends and in the total order."""
        for first, then in combinations(self.all.values(), 2):
            shared = [(a, b) for rank, a in first.ends() for other, b in then.ends() if rank == other]
            if not shared:
                continue
            earlier = self.cp.new_bool_var(f"{first.reader} before {then.reader}")
            for one, other, flag, starts in ((first, then, earlier, shared), (then, first, earlier.negated(), shared)):
                self.cp.add(one.place < other.place).only_enforce_if(flag)
                for a, b in starts:
                    before, after = (a, b) if one is first else (b, a)
                    self.cp.add(after >= before + one.seconds + self.overhead).only_enforce_if(flag)
            if first.reader[:2] == then.reader[:2]:
                self.cp.add(earlier == 1 if first.reader < then.reader else earlier == 0)

    def hint(self, action: Action, start: float, end: float) -> None:
        """Start the search with the times of a SEND or a RECV."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        assert microbatch is not None
        sends = kind in (Kind.SEND_F, Kind.SEND_B)
        step = {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(kind, 0)
        message = self.all[Kind.F if kind in (Kind.SEND_F, Kind.RECV_F) else Kind.I, stage + step, microbatch]
        self.cp.add_hint(message.send if sends else message.receive, round(start) if sends else round(end) - message.seconds)

    def actions(self, solver: cp_model.CpSolver) -> Iterator[tuple[int, tuple[int, int], Action]]:
        """(rank, when, action) of each SEND and RECV; `when` sorts messages that take no time by the total order."""
        for (kind, stage, microbatch), message in self.all.items():
            kinds = (Kind.SEND_F, Kind.RECV_F) if kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
            stages = (stage - 1 if kind is Kind.F else stage + 1, stage)
            for (rank, start), word, at in zip(message.ends(), kinds, stages, strict=True):
                yield rank, (solver.value(start), solver.value(message.place)), Action(at, word, microbatch)
