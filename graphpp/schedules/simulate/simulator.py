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

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from graphpp.arguments import one_of, require
from graphpp.errors import ScheduleError
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.simulate.bytes_over_time import MemoryCurves
from graphpp.schedules.simulate.step_time import check_stages
from graphpp.schedules.simulate.timeline import EventColumns, EventRow, Timeline
from graphpp.schedules.simulate.works import PENDING, Key, Work, Works
from graphpp.schedules.table.actions import COMPUTE, PER_STAGE, SENDS, Action, Kind, send_of
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.in_order import Stuck, in_order
from graphpp.schedules.table.schedule import Schedule

_GRADIENTS = frozenset((Kind.B, Kind.W))
_DRAWABLE = one_of(Schedule, Timeline, takes="a graphpp.Schedule or a graphpp.Timeline")


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of one step: events, makespan, bubble and peak bytes per rank, in the units of `costs`.

    Raises `ScheduleError` if the costs are for another number of stages, and if the table cannot run to its end.
    """
    check_stages(costs, schedule.name, schedule.stages)
    if costs.blocking and not schedule.has_communication:
        schedule = add_send_recv(schedule)
    events = _Machine(schedule, costs).events()
    return Timeline(schedule, events, MemoryCurves(schedule, events, costs))


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
    unit = Costs.unit(schedule.stages, schedule.ranks, recompute=Kind.R in schedule.kinds) if schedule.stages else Costs(())
    return replace(simulate(schedule, unit), unit="units")


class _PostSends(NamedTuple):
    """The moment at which a rank posts the sends of an action, before the action waits for anything else."""

    action: Action
    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return str(self.action)


_Step = Action | _PostSends


def _steps(action: Action) -> tuple[_Step, ...]:
    sends = tuple(leaf for leaf in action.leaves if leaf.kind in SENDS)
    return (_PostSends(action, sends), action) if sends else (action,)


def _leaves(step: _Step) -> Sequence[Any]:
    """The parts of a step, or the step itself; the microbatch of a leaf that needs or makes a value is a number."""
    return step.parts or (step,)


@dataclass
class _RankState:
    """When the rank and its line of collectives are free, and stages gathered; stages with gradients not reduced yet.

    `starts`, `ends`: of the actions of the row.
    """

    works: Mapping[Key, Work]
    free: float = 0.0
    line_free: float = 0.0
    gathered: dict[int, float] = field(default_factory=dict)
    unreduced: set[int] = field(default_factory=set)
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))

    def add(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)


class _Machine:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        works = Works(schedule, "d", self._time, blocking=costs.blocking)
        self.ranks, self._posted = list(map(_RankState, works.on)), works.records
        keys = (key for row in schedule.works for key in row if key[1] in COMPUTE)
        self._ahead, kinds = schedule.recomputed_ahead, list(keys)
        self._seconds = {(stage, kind): costs.stages[stage].of(kind) for stage, kind in kinds}
        stages = {stage for stage, _ in self._ahead}
        self._seconds_ahead = {key: costs.stages[key[0]].of(key[1], True) for key in kinds if key[0] in stages}
        self._together = cache(costs.together)

    def events(self) -> EventColumns:
        """The events of the step. Raises `ScheduleError` if the table cannot run to its end."""
        actions = [[action for action in row if action] for row in self.schedule.table]
        steps: Sequence[Sequence[_Step]] = actions
        if self.schedule.has_communication:
            steps = [[step for action in row for step in _steps(action)] for row in actions]
        try:
            deque(in_order(steps, self._run), maxlen=0)
        except Stuck as fault:
            raise ScheduleError(self._stuck(fault)) from None
        return EventColumns([EventRow(row, rank.starts, rank.ends) for row, rank in zip(actions, self.ranks, strict=True)])

    def _run(self, number: int, step: _Step) -> bool:
        """Run a step if its inputs have arrived; whether they have."""
        rank, there = self.ranks[number], 0.0
        works, leaves = rank.works, _leaves(step)
        for stage, kind, microbatch, _ in leaves:
            for records, seconds, _ in works[stage, kind].needs:
                for record in records:
                    time = record[microbatch]
                    if time != PENDING:
                        time += seconds
                        if time > there:
                            there = time
                        break
                else:
                    return False
        begin = rank.free + self.costs.overhead
        if isinstance(step, _PostSends):
            for send in leaves:
                works[send[:2]].record[send.microbatch] = begin
        elif step.kind in COMPUTE:
            self._compute(rank, step, max(begin, there))
        elif step.kind in PER_STAGE:
            self._collect(rank, step, begin)
        else:
            self._communicate(rank, leaves, begin)
        return True

    def _time(self, send: Action | None) -> float:
        if send is None:
            return 0.0
        if send.kind is Kind.SEND_F:
            return self.costs.message(self.costs.sends_forward, send.stage)
        return self.costs.message(self.costs.sends_backward, send.stage - 1)

    def _stuck(self, fault: Stuck[_Step]) -> str:
        """The error text: the action at which each rank stops, and the value for which it waits."""
        lines = []
        for number, step in sorted(fault.heads.items()):
            missing = next(self._missing(number, step))
            lines.append(f"    rank {number} stops at {step}, which waits for {_text(missing)}")
        what = f"{self.schedule.name!r} cannot run to its end, these wait for each other or for what never runs"
        return "\n".join([f"{what}; reorder or complete them (`check` says more)", *lines])

    def _missing(self, number: int, step: _Step) -> Iterator[tuple[Action, ...]]:
        """For each value that has not arrived, the computations of which any one makes it."""
        for leaf in _leaves(step):
            for records, _, makers in self.ranks[number].works[leaf[:2]].needs:
                if all(record[leaf.microbatch] == PENDING for record in records):
                    yield tuple(maker._replace(microbatch=leaf.microbatch) for maker in makers)

    def _compute(self, rank: _RankState, action: Action, begin: float) -> None:
        works, leaves = rank.works, _leaves(action)
        if rank.gathered:
            begin = max(begin, *(rank.gathered.get(leaf.stage, 0.0) for leaf in leaves))
        if action.parts:
            seconds = self._together(tuple([(leaf.stage, leaf.kind, leaf[:3:2] in self._ahead) for leaf in leaves]))
        else:
            leaf = leaves[0]
            seconds = (self._seconds_ahead if self._ahead and leaf[:3:2] in self._ahead else self._seconds)[leaf[:2]]
        end = rank.free = begin + seconds
        rank.starts.append(begin)
        rank.ends.append(end)
        for stage, kind, microbatch, _ in leaves:
            works[stage, kind].record[microbatch] = end
            if kind in _GRADIENTS:
                rank.unreduced.add(stage)

    def _collect(self, rank: _RankState, action: Action, begin: float) -> None:
        """Start the gather or the reduction of a stage, which overlaps with computations."""
        stage, rank.free = action.stage, begin
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
        rank.add(start, start + seconds)

    def _communicate(self, rank: _RankState, leaves: Sequence[Any], begin: float) -> None:
        end = begin
        if self.costs.blocking:
            for send in map(send_of, leaves):
                end = max(end, max(begin, self._posted[send[:2]][send.microbatch or 0]) + self._time(send))
        for leaf in leaves:
            if leaf.kind not in SENDS:
                rank.works[leaf[:2]].record[leaf.microbatch] = end
        rank.add(begin, end)
        rank.free = end


def _text(makers: tuple[Action, ...]) -> str:
    return str(makers[0]) if len(makers) == 1 else f"the gradient of {' or '.join(map(str, makers))}"
