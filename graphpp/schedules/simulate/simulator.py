"""Runs a schedule on paper: when each action would start and end, and what would be alive, for given costs.

Contract
    in    any table whose actions the costs cover, with or without sends and receives; idle cells mean nothing here
    out   a `Timeline`; or `ScheduleError` where ranks wait for each other for ever, naming each of them

A rank runs its row in order, and an action starts when its rank is free and its inputs are there. Between ranks a
result takes the time of a message more, counted from the end of its computation, or from the SEND where the table has
one. Nothing else slows a message down: channels have room for any number, and a receive does not have to be posted
before the send. With `costs.blocking` the SEND holds its rank for that time, the RECV its own until the message is
over; a table without sends and receives is given them first. The parts of a batch run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from graphpp.errors import ScheduleError
from graphpp.schedules.rewrite.add_send_recv import add_communication
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule

Value = tuple[str, int, int | None]
"""What one action leaves for others: (made, stage, microbatch). B and I both make the gradient "B" for the stage below."""

_MAKES = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of one step: events, makespan, bubble and peak bytes per rank, in the units of `costs`.

    Raises `ScheduleError` if the costs are for another number of stages, and if the table cannot run to its end
    (`graphpp.schedules.check.checker.check` says more about a wrong table).
    """
    if len(costs.stages) != schedule.stages:
        raise ScheduleError(
            f"the costs are for {len(costs.stages)} stages, but {schedule.name!r} has {schedule.stages}; "
            "give the costs of each of its stages"
        )
    if costs.blocking and not schedule.has_communication:
        schedule = add_communication(schedule)
    machine = _Machine(schedule, costs, _where(schedule), _kept(schedule))
    machine.run()
    events = tuple(event for rank in machine.ranks for event in rank.events)
    return Timeline(schedule, events, tuple(tuple(rank.memory) for rank in machine.ranks))


def _where(schedule: Schedule) -> Mapping[int, int]:
    """Stage -> rank, after a look at whether all stages of the table exist."""
    for stage, rank in schedule.rank_of_stage.items():
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"{schedule.name!r}, rank {rank}: there is no stage {stage} of {schedule.stages}")
    return schedule.rank_of_stage


def _kept(schedule: Schedule) -> frozenset[Value]:
    """Forwards whose activations a backward will read; the others' are gone when they end, as in evaluation."""
    leaves = (leaf for _, _, action in schedule.cells() for leaf in action.leaves)
    return frozenset(("F", leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.B, Kind.I))


@dataclass
class _Rank:
    row: list[Action]
    at: int = 0
    free: float = 0.0
    live: int = 0
    events: list[Event] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    def change(self, time: float, count: int) -> None:
        if count:
            self.live += count
            self.memory.append((time, self.live))


class _Machine:
    """`made[value]`: when it was made, on its own rank. `sent[value]`: when its message left, where sends are actions."""

    def __init__(self, schedule: Schedule, costs: Costs, where: Mapping[int, int], kept: frozenset[Value]) -> None:
        self.schedule, self.costs, self.where, self.kept = schedule, costs, where, kept
        self.ranks = [_Rank([action for action in row if action]) for row in schedule.table]
        self.made: dict[Value, float] = {}
        self.sent: dict[Value, float] = {}
        self.received: dict[Value, float] = {}
        self.waiting: dict[Value, list[int]] = {}

    def run(self) -> None:
        todo = list(range(len(self.ranks)))
        while todo:
            number = todo.pop()
            rank = self.ranks[number]
            while rank.at < len(rank.row):
                missing = self._step(number, rank, rank.row[rank.at], todo)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(number)
                    break
                rank.at += 1
        if any(rank.at < len(rank.row) for rank in self.ranks):
            raise ScheduleError(self._stuck())

    def _step(self, number: int, rank: _Rank, action: Action, todo: list[int]) -> Value | None:
        """Run one action, or tell what it waits for."""
        begin = rank.free + self.costs.overhead
        if action.is_compute:
            return self._compute(number, rank, action, begin, todo)
        carried = [(leaf.kind in _RECEIVES, value) for leaf in action.leaves if (value := _carried(leaf))]
        end = begin
        # All sends of a batch are under way before it waits for its receives.
        for receives, value in sorted(carried):
            missing = self._receive(value) if receives else self._send(value, begin, todo)
            if missing is not None:
                return missing
            if self.costs.blocking:
                end = max(end, max(begin, self.sent[value]) + self._time(value))
        self.received.update((value, end) for receives, value in carried if receives)
        rank.events.append(Event(number, action, begin, end))
        rank.free = end
        return None

    def _send(self, value: Value, begin: float, todo: list[int]) -> Value | None:
        if value not in self.made:
            return value
        self.sent.setdefault(value, begin)
        todo += self.waiting.pop(value, ())
        return None

    def _receive(self, value: Value) -> Value | None:
        return value if self.costs.blocking and value not in self.sent else None

    def _compute(self, number: int, rank: _Rank, action: Action, begin: float, todo: list[int]) -> Value | None:
        for leaf in action.leaves:
            for value in _inputs(leaf, self.schedule.stages):
                there = self._arrival(value, number)
                if there is None:
                    return value
                begin = max(begin, there)
        end = rank.free = begin + self.costs.of(action)
        rank.events.append(Event(number, action, begin, end))
        changes = [self._change(leaf) for leaf in action.leaves]
        rank.change(begin, sum(start for start, _ in changes))
        rank.change(end, sum(at_end for _, at_end in changes))
        for leaf in action.leaves:
            value = (_MAKES[leaf.kind], leaf.stage, leaf.microbatch)
            self.made[value] = end
            todo += self.waiting.pop(value, ())
        return None

    def _change(self, leaf: Action) -> tuple[int, int]:
        followed = leaf.kind is not Kind.F or ("F", leaf.stage, leaf.microbatch) in self.kept
        return self.costs.stages[leaf.stage].change(leaf.kind, followed)

    def _arrival(self, value: Value, number: int) -> float | None:
        """When a value is on the rank that reads it; None while that is not known."""
        made = self.made.get(value)
        if self.where.get(value[1]) == number or made is None:
            return made
        if not self.schedule.has_communication:
            return made + self._time(value)
        if value not in self.sent or value not in self.received:
            return None
        return max(self.sent[value] + self._time(value), self.received[value])

    def _time(self, value: Value) -> float:
        kind, stage, _ = value
        if kind == "F":
            return self.costs.message(self.costs.sends_forward, stage)
        return self.costs.message(self.costs.sends_backward, stage - 1)

    def _stuck(self) -> str:
        """Where each rank that did not come to its end stands, and for what."""
        waits = {number: value for value, numbers in self.waiting.items() for number in numbers}
        lines = [
            f"    rank {number} stops at {self.ranks[number].row[self.ranks[number].at]}, which waits for {_text(value)}"
            for number, value in sorted(waits.items())
        ]
        what = f"{self.schedule.name!r} cannot run to its end, these wait for each other or for what never runs"
        return "\n".join([f"{what}; reorder or complete them (`check` says more)", *lines])


def _text(value: Value) -> str:
    made, stage, microbatch = value
    return (
        f"the gradient of {stage}B{microbatch} or {stage}I{microbatch}" if made == "B" else f"{stage}{made}{microbatch}"
    )


def _carried(leaf: Action) -> Value | None:
    """The value that a send or a receive carries; None for what is neither."""
    if not leaf.is_communication:
        return None
    made = "F" if leaf.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
    step = 0 if leaf.kind not in _RECEIVES else -1 if made == "F" else 1
    return made, leaf.stage + step, leaf.microbatch


def _inputs(leaf: Action, stages: int) -> Iterator[Value]:
    """What a computation reads, of its own stage and of a neighbour's."""
    if leaf.kind is Kind.W:
        yield "B", leaf.stage, leaf.microbatch
        return
    if leaf.kind is not Kind.F:
        yield "F", leaf.stage, leaf.microbatch
        if leaf.stage < stages - 1:
            yield "B", leaf.stage + 1, leaf.microbatch
    elif leaf.stage > 0:
        yield "F", leaf.stage - 1, leaf.microbatch
