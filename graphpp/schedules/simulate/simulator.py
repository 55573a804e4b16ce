"""Simulate a schedule: when each action starts and ends, and how many bytes are alive, for given costs.

- A rank runs its row in order; idle cells are ignored. An action starts when its rank is free and its inputs have arrived. If
  ranks wait for each other forever, `ScheduleError` names the action at which each stops.
- A value for another rank arrives one message time after the end of its computation, or after its SEND if the table has one;
  channels take any number of messages. With `costs.blocking` a SEND occupies its rank for the message time, and a RECV its own
  until the message has ended; a compute-only table gets sends and receives first. The messages of a batch run concurrently.
- Gathers and reductions of sharded stages run one after the other, in row order, while the rank computes: UNSHARD and
  REDUCE_GRAD only start them. The first computation after an UNSHARD waits for the gather of its stage, and the step for all
  reductions. Their events show when the gather or reduction runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graphpp.arguments import one_of, require
from graphpp.errors import ScheduleError
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.simulate.bytes_over_time import memory_curves
from graphpp.schedules.simulate.step_time import check_stages
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.actions import PER_STAGE, SENDS, Action, Kind, computations, inputs, message, peer
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.in_order import Stuck, in_order
from graphpp.schedules.table.schedule import Schedule

_DRAWABLE = one_of(Schedule, Timeline, takes="a graphpp.Schedule or a graphpp.Timeline")


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of one step: events, makespan, bubble and peak bytes per rank, in the units of `costs`.

    Raises `ScheduleError` if the costs are for another number of stages, and if the table cannot run to its end.
    """
    check_stages(costs, schedule.name, schedule.stages)
    if costs.blocking and not schedule.has_communication:
        schedule = add_send_recv(schedule)
    strange = next((stage for stage in schedule.rank_of_stage if not 0 <= stage < schedule.stages), None)
    if strange is not None:
        raise ScheduleError(f"{schedule.name!r}: there is no stage {strange} of {schedule.stages}")
    machine = _Machine(schedule, costs)
    machine.run()
    events = tuple(event for rank in machine.ranks for event in sorted(rank.events, key=lambda event: event.start))
    return Timeline(schedule, events, memory_curves(schedule, events, costs))


def timelines_of(drawn: Sequence[Schedule | Timeline], costs: Costs | None = None) -> list[Timeline]:
    """The timelines, and simulated schedules: with `costs`, else with F = I = W = 1 for each rank and microbatch in "units".

    Raises `ScheduleError` for anything else, and for tables that `simulate` refuses.
    """
    for each in drawn:
        require(ScheduleError, "drawn", _DRAWABLE, each)
    return [each if isinstance(each, Timeline) else _step(each, costs) for each in drawn]


def _step(schedule: Schedule, costs: Costs | None) -> Timeline:
    if costs is not None:
        return simulate(schedule, costs)
    unit = Costs.unit(schedule.stages, schedule.ranks) if schedule.stages else Costs(())
    return replace(simulate(schedule, unit), unit="units")


class _PostSends(NamedTuple):
    """The moment at which a rank posts the sends of an action, before the action waits for anything else."""

    action: Action
    sends: tuple[Action, ...]

    def __str__(self) -> str:
        return str(self.action)


_Step = Action | _PostSends
_Makers = tuple[Action, ...]


def _steps(action: Action) -> tuple[_Step, ...]:
    sends = tuple(leaf for leaf in action.leaves if leaf.kind in SENDS)
    return (_PostSends(action, sends), action) if sends else (action,)


@dataclass
class _RankState:
    """When the rank and its line of collectives are free, and stages gathered; stages with gradients not reduced yet."""

    free: float = 0.0
    line_free: float = 0.0
    gathered: dict[int, float] = field(default_factory=dict)
    unreduced: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class _Machine:
    """`ended[computation]` and `sent[send]`: the time of each; `received[receive]`: when the receive released its rank."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.where = schedule.rank_of_stage
        self.ranks = [_RankState() for _ in schedule.table]
        self.ended: dict[Action, float] = {}
        self.sent: dict[Action, float] = {}
        self.received: dict[Action, float] = {}
        self.there = 0.0  # arrival of the last input of the step that `_ready` checked last

    def run(self) -> None:
        rows = [[step for action in row if action for step in _steps(action)] for row in self.schedule.table]
        try:
            for number, step in in_order(rows, self._ready):
                begin = self.ranks[number].free + self.costs.overhead
                if isinstance(step, _PostSends):
                    self.sent.update(dict.fromkeys(step.sends, begin))
                elif step.is_compute:
                    gathered = self.ranks[number].gathered
                    self._compute(number, step, max(begin, self.there, *(gathered.get(leaf.stage, 0) for leaf in step.leaves)))
                elif step.kind in PER_STAGE:
                    self._collect(number, step, begin)
                else:
                    self._communicate(number, step, begin)
        except Stuck as fault:
            raise ScheduleError(self._stuck(fault)) from None

    def _ready(self, number: int, step: _Step) -> bool:
        self.there = 0.0
        for _, time in self._reads(number, step):
            if time is None:
                return False
            self.there = max(self.there, time)
        return True

    def _reads(self, number: int, step: _Step) -> Iterator[tuple[_Makers, float | None]]:
        """For each value that a step needs: the computations of which any one makes it, and its time of arrival or None."""
        if isinstance(step, _PostSends):
            yield from ((computations(send), self._end(computations(send))) for send in step.sends)
        elif step.is_compute:
            for leaf in step.leaves:
                for makers in inputs(leaf, self.schedule.stages):
                    yield makers, self._arrival(makers, number)
        elif self.costs.blocking:
            sends = map(peer, self._receives(step))
            yield from ((computations(send), self.sent.get(send)) for send in sends)

    def _receives(self, action: Action) -> Iterator[Action]:
        return (leaf for leaf in action.leaves if leaf.is_communication and leaf.kind not in SENDS)

    def _end(self, makers: _Makers) -> float | None:
        for maker in makers:
            if maker in self.ended:
                return self.ended[maker]
        return None

    def _arrival(self, makers: _Makers, number: int) -> float | None:
        """When the value that one of `makers` makes is on the rank that reads it; None if not yet known."""
        end = self._end(makers)
        if end is None or self.where.get(makers[0].stage) == number:
            return end
        ends = message(makers[0], self.schedule.stages)
        if ends is None:
            return end
        send, receive = ends
        if not self.schedule.has_communication:
            return end + self._time(send)
        if send not in self.sent or receive not in self.received:
            return None
        return max(self.sent[send] + self._time(send), self.received[receive])

    def _time(self, send: Action) -> float:
        if send.kind is Kind.SEND_F:
            return self.costs.message(self.costs.sends_forward, send.stage)
        return self.costs.message(self.costs.sends_backward, send.stage - 1)

    def _stuck(self, fault: Stuck[_Step]) -> str:
        """The error text: the action at which each rank stops, and the value for which it waits."""
        lines = []
        for number, step in sorted(fault.heads.items()):
            missing = next(makers for makers, time in self._reads(number, step) if time is None)
            lines.append(f"    rank {number} stops at {step}, which waits for {_text(missing)}")
        what = f"{self.schedule.name!r} cannot run to its end, these wait for each other or for what never runs"
        return "\n".join([f"{what}; reorder or complete them (`check` says more)", *lines])

    def _compute(self, number: int, action: Action, begin: float) -> None:
        rank = self.ranks[number]
        end = rank.free = begin + self.costs.of(action)
        rank.events.append(Event(number, action, begin, end))
        self.ended.update(dict.fromkeys(action.leaves, end))
        rank.unreduced.update(leaf.stage for leaf in action.leaves if leaf.kind in (Kind.B, Kind.W))

    def _collect(self, number: int, action: Action, begin: float) -> None:
        """Start the gather or the reduction of a stage, which overlaps with computations."""
        rank, stage = self.ranks[number], action.stage
        rank.free = begin
        if action.kind is Kind.UNSHARD:
            times = self.costs.gathers
        else:
            times = self.costs.reductions if stage in rank.unreduced else ()
            rank.unreduced.discard(stage)
        seconds = times[stage] if times else 0.0
        start = max(begin, rank.line_free) if seconds else begin
        rank.line_free = max(rank.line_free, start + seconds)
        if action.kind is Kind.UNSHARD:
            rank.gathered[stage] = start + seconds
        rank.events.append(Event(number, action, start, start + seconds))

    def _communicate(self, number: int, action: Action, begin: float) -> None:
        rank, end = self.ranks[number], begin
        if self.costs.blocking:
            sends = (leaf if leaf.kind in SENDS else peer(leaf) for leaf in action.leaves if leaf.is_communication)
            end = max([end, *(max(begin, self.sent[send]) + self._time(send) for send in sends)])
        self.received.update(dict.fromkeys(self._receives(action), end))
        rank.events.append(Event(number, action, begin, end))
        rank.free = end


def _text(makers: _Makers) -> str:
    return str(makers[0]) if len(makers) == 1 else f"the gradient of {' or '.join(map(str, makers))}"
