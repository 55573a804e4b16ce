"""The seconds of many steps under one table: the table is read once, and each step takes one short loop.

Contract
    in    a table that `check` accepts; `seconds(costs)` takes costs without blocking messages and without overhead
    out   the makespan of `simulator.simulate`, and the seconds for which each rank computes: equal numbers, up to rounding;
          with `copies` those of a step that offloads values, which `simulate` does not know
    Raises `ScheduleError` for a table that cannot run to its end, and for costs of another number of stages.

A planner asks hundreds of times for the same table with other costs. Without overhead and blocking only computations, gathers
and reductions take time. A computation waits for its rank's last one, for messages of other ranks, and for gathers of its
stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.simulate.host_copies import HostCopies
from graphpp.schedules.table.actions import COMPUTE, PER_STAGE, SENDS, Action, Kind, inputs, message
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule


class StepSpan(NamedTuple):
    """`makespan`: of the step; `busy`: by rank, for how long it computes."""

    makespan: float
    busy: tuple[float, ...]


_Step = tuple[int, int, tuple[tuple[int, int], ...]]
"""A computation, a gather or a reduction: its rank, the number of its price, and its reads.

The reads: (number of an earlier step, number of a message) of all values that other ranks, or gathers, make.
"""


class _Price(NamedTuple):
    """The facts that all steps of one price share. `kind`: UNSHARD, REDUCE_GRAD, OVERLAP_F_B, or that of the only leaf."""

    kind: Kind
    leaves: tuple[tuple[int, Kind], ...]

    @property
    def is_collective(self) -> bool:
        return self.kind in PER_STAGE

    def seconds(self, costs: Costs) -> float:
        if self.is_collective:
            times = costs.gathers if self.kind is Kind.UNSHARD else costs.reductions
            return times[self.leaves[0][0]] if times else 0.0
        total = sum(costs.stages[stage].of(kind) for stage, kind in self.leaves)
        return total * costs.overlap if self.kind is Kind.OVERLAP_F_B else total


class StepTimes:
    """A table, read once."""

    def __init__(self, schedule: Schedule) -> None:
        self._name, self._stages, self._ranks = schedule.name, schedule.stages, schedule.ranks
        numbers: dict[_Price, int] = {}
        self._steps: list[_Step] = []
        self._actions: list[Action] = []
        for rank, action, reads in _Reading(schedule).steps():
            self._steps.append((rank, numbers.setdefault(_price(action), len(numbers)), reads))
            self._actions.append(action)
        self._prices = list(numbers)
        self._collective = [price.is_collective for price in self._prices]
        self._plain = self._computations()
        self._counts = [Counter[int]() for _ in range(self._ranks)]
        for rank, price, _ in self._plain:
            self._counts[rank][price] += 1

    def _computations(self) -> list[_Step]:
        """The steps that compute, with the numbers that they have among themselves."""
        number: dict[int, int] = {}
        found: list[_Step] = []
        for at, (rank, price, reads) in enumerate(self._steps):
            if not self._collective[price]:
                number[at] = len(found)
                own = tuple([(number[source], lag) for source, lag in reads if source in number])
                found.append((rank, price, own))
        return found

    def seconds(self, costs: Costs, *, collectives: bool = True, copies: HostCopies | None = None) -> StepSpan:
        """The span of a step. `collectives`: with gathers and reductions. `copies`: of offloaded values."""
        if len(costs.stages) != self._stages:
            raise ScheduleError(
                f"the costs are for {len(costs.stages)} stages, but {self._name!r} has {self._stages}; "
                "give the costs of each of its stages"
            )
        if costs.blocking or costs.overhead:
            raise ScheduleError("costs: graphpp.simulate has blocking messages and overhead, these step times have neither")
        took, lags = [price.seconds(costs) for price in self._prices], _lags(costs)
        if not collectives:
            took = [0.0 if own else each for each, own in zip(took, self._collective, strict=True)]
        shared = any(each for each, own in zip(took, self._collective, strict=True) if own)
        makespan = self._alone(took, lags) if copies is None and not shared else self._on_lines(took, lags, copies)
        busy = tuple(sum(took[price] * count for price, count in counts.items()) for counts in self._counts)
        return StepSpan(makespan, busy)

    def _alone(self, took: Sequence[float], lags: Sequence[float]) -> float:
        free, ends = [0.0] * self._ranks, [0.0] * len(self._plain)
        for at, (rank, price, reads) in enumerate(self._plain):
            begin = free[rank]
            for source, lag in reads:
                there = ends[source] + lags[lag]
                if there > begin:  # a call of max takes longer, and a search spends its time here
                    begin = there
            free[rank] = ends[at] = begin + took[price]
        return max(free, default=0.0)

    def _on_lines(self, took: Sequence[float], lags: Sequence[float], copies: HostCopies | None) -> float:
        """Gathers and reductions run one after the other on a line of their own, copies on another, while the rank computes."""
        free, line, ends = [0.0] * self._ranks, [0.0] * self._ranks, [0.0] * len(self._steps)
        for at, (rank, price, reads) in enumerate(self._steps):
            begin, seconds = free[rank], took[price]
            if self._collective[price]:
                if seconds:
                    begin = max(begin, line[rank])
                    line[rank] = begin + seconds
                ends[at] = begin + seconds
                continue
            for source, lag in reads:
                begin = max(begin, ends[source] + lags[lag])
            if copies is None:
                free[rank] = ends[at] = begin + seconds
            else:
                action = self._actions[at]
                free[rank] = ends[at] = copies.after(rank, action, copies.before(rank, action, begin) + seconds)
        return max(*free, *line)


def _price(action: Action) -> _Price:
    stage, kind, _, parts = action
    if parts:
        return _Price(kind, tuple([(part.stage, part.kind) for part in parts]))
    kind = Kind.REDUCE_GRAD if kind is Kind.RESHARD else kind
    return _Price(kind, ((stage, kind),))


def _lags(costs: Costs) -> list[float]:
    """The seconds of each message, by 2 x boundary and direction; the last entry is no message."""
    found: list[float] = []
    for boundary in range(len(costs.stages) - 1):
        found += [costs.message(costs.sends_forward, boundary), costs.message(costs.sends_backward, boundary)]
    return [*found, 0.0]


class _Reading:
    """The steps of a table in an order in which they can run, and which earlier steps each of them reads."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._where = schedule, schedule.rank_of_stage
        self._stages, self._sends = schedule.stages, schedule.has_communication
        self._rows = [[action for action in row if action is not None] for row in schedule.table]
        self._number, self._none = 0, 2 * (schedule.stages - 1)
        self._ended: dict[Action, int] = {}  # computations, by the number of their step
        self._sent: dict[Action, int] = {}  # sends, by the number of the last computation before them
        self._latest: list[int] = [-1] * schedule.ranks
        self._gathers: list[dict[int, int]] = [{} for _ in schedule.table]  # by stage, for the next computation
        self._unreduced: list[set[int]] = [set() for _ in schedule.table]
        self._waiting: dict[Action, list[int]] = {}  # ranks, by the computation or the send for which they wait

    def steps(self) -> Iterator[tuple[int, Action, tuple[tuple[int, int], ...]]]:
        """(rank, action, its reads) of all that takes time. Raises `ScheduleError` for a table that stops before its end."""
        at, todo = [0] * len(self._rows), list(range(len(self._rows)))
        waiting = self._waiting
        while todo:
            rank = todo.pop()
            row = self._rows[rank]
            while at[rank] < len(row):
                action = row[at[rank]]
                reads = self._reads(rank, action) if action.kind in COMPUTE else ()
                if reads is None:
                    break
                at[rank] += 1
                if self._takes_time(rank, action):
                    yield rank, action, reads
                    self._number += 1
                if waiting:
                    for leaf in action.leaves:
                        todo += waiting.pop(leaf, ())
        stopped = [str(row[place]) for row, place in zip(self._rows, at, strict=True) if place < len(row)]
        if stopped:
            raise ScheduleError(f"{self._schedule.name!r}: no rank can go on: they stop at {', '.join(stopped)}")

    def _reads(self, rank: int, action: Action) -> tuple[tuple[int, int], ...] | None:
        """(step, message) of the values of other ranks, and of gathers, that a computation waits for; None: one is missing."""
        found: list[tuple[int, int]] = []
        gathers = self._gathers[rank]
        gathered = []
        for leaf in action.leaves:
            for makers in inputs(leaf, self._stages):
                source = self._source(makers, rank)
                if source is None:
                    return None
                if source[1] != self._none:
                    found.append(source)
            if leaf.stage in gathers:
                gathered.append(leaf.stage)
        if gathered:  # two leaves of one stage wait for one gather
            found += [(gathers.pop(stage), self._none) for stage in dict.fromkeys(gathered)]
        return tuple(found)

    def _source(self, makers: Sequence[Action], rank: int) -> tuple[int, int] | None:
        """(step, message) of a value; None if nothing has made it yet: then the rank waits for it."""
        for maker in makers:
            made = self._ended.get(maker)
            if made is not None:
                break
        else:
            for each in makers:
                self._waiting.setdefault(each, []).append(rank)
            return None
        ends = message(maker, self._stages) if self._where[maker.stage] != rank else None
        if ends is None:
            return made, self._none
        send, _ = ends
        at = self._sent.get(send) if self._sends else made
        if at is None:
            self._waiting.setdefault(send, []).append(rank)
            return None
        return at, 2 * (send.stage - (send.kind is Kind.SEND_B)) + (send.kind is Kind.SEND_B)

    def _takes_time(self, rank: int, action: Action) -> bool:
        """Whether an action is a step; the place of each action is noted."""
        if action.kind in COMPUTE:
            for leaf in action.leaves:
                self._ended[leaf] = self._number
                if leaf.kind in (Kind.B, Kind.W):
                    self._unreduced[rank].add(leaf.stage)
            self._latest[rank] = self._number
            return True
        if action.kind is Kind.UNSHARD:
            self._gathers[rank][action.stage] = self._number
            return True
        if action.kind in PER_STAGE:
            reduces = action.stage in self._unreduced[rank]
            self._unreduced[rank].discard(action.stage)
            return reduces
        for leaf in action.leaves:
            if leaf.kind in SENDS:
                self._sent[leaf] = self._latest[rank]
        return False
