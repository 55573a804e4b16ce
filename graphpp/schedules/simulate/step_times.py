"""The seconds of many steps under one table: the table is read once, and each step takes one short loop.

Contract
    in    a table that `check` accepts; `seconds(costs)` takes costs without blocking messages and without overhead
    out   the makespan of `simulator.simulate`, and the seconds for which each rank computes: equal numbers, up to rounding
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
from graphpp.schedules.table.actions import PER_STAGE, SENDS, Action, Kind, inputs, message
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.in_order import in_order
from graphpp.schedules.table.schedule import Schedule


class StepSpan(NamedTuple):
    """`makespan`: of the step; `busy`: by rank, for how long it computes."""

    makespan: float
    busy: tuple[float, ...]


class _Step(NamedTuple):
    """A computation, a gather or a reduction. `price`: its number in the list of prices.

    `reads`: (number of an earlier step, number of a message) of all values that other ranks, or gathers, make.
    """

    rank: int
    price: int
    reads: tuple[tuple[int, int], ...]


class _Price(NamedTuple):
    """What steps of one price have in common. `kind`: UNSHARD, REDUCE_GRAD, OVERLAP_F_B, or that of the only leaf."""

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
        reading = _Reading(schedule)
        self._steps = [
            _Step(rank, numbers.setdefault(_price(action), len(numbers)), reading.note(rank, action))
            for rank, action in reading.ordered()
        ]
        self._prices = list(numbers)
        self._collective = [price.is_collective for price in self._prices]
        self._plain = self._computations()
        self._counts = [Counter(step.price for step in self._plain if step.rank == rank) for rank in range(self._ranks)]

    def _computations(self) -> list[_Step]:
        """The steps that compute, with the numbers that they have among themselves."""
        own = [at for at, step in enumerate(self._steps) if not self._collective[step.price]]
        number = {at: new for new, at in enumerate(own)}
        steps = [self._steps[at] for at in own]
        return [step._replace(reads=tuple((number[at], lag) for at, lag in step.reads if at in number)) for step in steps]

    def seconds(self, costs: Costs, *, collectives: bool = True) -> StepSpan:
        """The span of a step. `collectives`: with gathers and reductions."""
        if len(costs.stages) != self._stages:
            raise ScheduleError(
                f"the costs are for {len(costs.stages)} stages, but {self._name!r} has {self._stages}; "
                "give the costs of each of its stages"
            )
        if costs.blocking or costs.overhead:
            raise ScheduleError("costs: graphpp.simulate has blocking messages and overhead, these step times have neither")
        took, lags = [price.seconds(costs) for price in self._prices], _lags(costs)
        shared = collectives and any(each for each, own in zip(took, self._collective, strict=True) if own)
        makespan = self._with_collectives(took, lags) if shared else self._alone(took, lags)
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

    def _with_collectives(self, took: Sequence[float], lags: Sequence[float]) -> float:
        """Gathers and reductions run one after the other on a line of their own, while the rank computes."""
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
            free[rank] = ends[at] = begin + seconds
        return max(*free, *line)


def _price(action: Action) -> _Price:
    kind = Kind.REDUCE_GRAD if action.kind is Kind.RESHARD else action.kind
    leaves = tuple((leaf.stage, leaf.kind) for leaf in action.leaves)
    return _Price(kind, leaves if action.is_compute else ((action.stage, kind),))


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
        self._number, self._none = 0, 2 * (schedule.stages - 1)
        self._ended: dict[Action, int] = {}  # computations, by the number of their step
        self._sent: dict[Action, int] = {}  # sends, by the number of the last computation before them
        self._latest: list[int] = [-1] * schedule.ranks
        self._gathers: list[dict[int, int]] = [{} for _ in schedule.table]  # by stage, for the next computation
        self._unreduced: list[set[int]] = [set() for _ in schedule.table]

    def ordered(self) -> Iterator[tuple[int, Action]]:
        """(rank, action) of all that takes time; the others are noted here."""
        rows = [[action for action in row if action is not None] for row in self._schedule.table]
        for rank, action in in_order(rows, self._ready):
            if action.is_compute or action.kind is Kind.UNSHARD:
                yield rank, action
            elif action.kind in PER_STAGE:
                if action.stage in self._unreduced[rank]:
                    self._unreduced[rank].remove(action.stage)
                    yield rank, action
            else:
                self._sent.update({leaf: self._latest[rank] for leaf in action.leaves if leaf.kind in SENDS})

    def _ready(self, rank: int, action: Action) -> bool:
        leaves = action.leaves if action.is_compute else ()
        return all(self._source(makers, rank) is not None for leaf in leaves for makers in inputs(leaf, self._schedule.stages))

    def _source(self, makers: tuple[Action, ...], rank: int) -> tuple[int, int] | None:
        """(step, message) of a value; None if nothing has made it yet."""
        maker = next((maker for maker in makers if maker in self._ended), None)
        if maker is None:
            return None
        ends = message(maker, self._schedule.stages)
        if ends is None or self._where[maker.stage] == rank:
            return self._ended[maker], self._none
        send, _ = ends
        at = self._sent.get(send) if self._schedule.has_communication else self._ended[maker]
        boundary = send.stage if send.kind is Kind.SEND_F else send.stage - 1
        return None if at is None else (at, 2 * boundary + (send.kind is Kind.SEND_B))

    def note(self, rank: int, action: Action) -> tuple[tuple[int, int], ...]:
        """The reads of a step that the next number belongs to, which is noted."""
        reads: list[tuple[int, int]] = []
        if action.is_compute:
            for leaf in action.leaves:
                found = (self._source(makers, rank) for makers in inputs(leaf, self._schedule.stages))
                reads += [each for each in found if each is not None and each[1] != self._none]
                if leaf.stage in self._gathers[rank]:
                    reads.append((self._gathers[rank].pop(leaf.stage), self._none))
                if leaf.kind in (Kind.B, Kind.W):
                    self._unreduced[rank].add(leaf.stage)
                self._ended[leaf] = self._number
            self._latest[rank] = self._number
        elif action.kind is Kind.UNSHARD:
            self._gathers[rank][action.stage] = self._number
        self._number += 1
        return tuple(reads)
