"""The seconds of many steps under one table: the table is read once, and each step takes one short loop.

- In: a table that `check` accepts; costs without blocking messages and without overhead. Out: the makespan of
  `simulator.simulate`, and each rank's computing seconds, equal up to rounding. With `copies`, offload traffic is included,
  which `simulate` ignores. Raises `ScheduleError` for a table that cannot run to its end, and for costs of another number of
  stages.
- Only computations, gathers and reductions take time. A computation waits for its rank's previous one, for messages of other
  ranks, and for gathers of its stages.
- All copies of a rank between device and host run one after the other, in starting order, as on one CUDA stream. An eviction
  starts when the forward has ended; the rank waits for its end after `evict_after`, when the memory is free. A prefetch starts
  with `prefetch_at`, and the rank waits for its end before `first_use`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.simulate.works import PENDING, Works
from graphpp.schedules.table.actions import COMPUTE, PER_STAGE, Action, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.in_order import in_order
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.recompute_marks import Pairs
from graphpp.schedules.table.schedule import Schedule


class StepSpan(NamedTuple):
    """`makespan` of the step; `busy`: by rank, the time it computes."""

    makespan: float
    busy: tuple[float, ...]


class HostCopies:
    """The copies of offloaded values in one step. `seconds`: of a window's copies in one direction.

    `before` and `after` are called for each action of a rank in order, and return the time at which the rank goes on.
    """

    def __init__(self, windows: Iterable[OffloadWindow], seconds: Callable[[OffloadWindow], float]) -> None:
        self._windows = list(windows)
        self._seconds = [seconds(window) for window in self._windows]
        self._ends = [0.0] * len(self._windows)
        self._line: dict[int, float] = defaultdict(float)
        self._evicted = self._by(lambda window: Action(window.stage, Kind.F, window.microbatch))
        self._freed = self._by(lambda window: window.evict_after)
        self._prefetched = self._by(lambda window: window.prefetch_at)
        self._read = self._by(lambda window: window.first_use)

    def _by(self, action_of: Callable[[OffloadWindow], Action]) -> Mapping[Action, Sequence[int]]:
        found: dict[Action, list[int]] = defaultdict(list)
        for at, window in enumerate(self._windows):
            found[action_of(window)].append(at)
        return dict(found)

    def before(self, rank: int, action: Action, now: float) -> float:
        """The start of an action whose rank and other inputs are ready at `now`."""
        for at in self._prefetched.get(action, ()):
            self._copy(rank, at, now)
        return self._after_copies(now, [at for leaf in action.leaves for at in self._read.get(leaf, ())])

    def after(self, rank: int, action: Action, now: float) -> float:
        """The time at which the rank goes on after an action that ends at `now`."""
        now = self._after_copies(now, self._freed.get(action, ()))
        for leaf in action.leaves:
            for at in self._evicted.get(leaf, ()):
                self._copy(rank, at, now)
        return now

    def _copy(self, rank: int, at: int, now: float) -> None:
        self._line[rank] = self._ends[at] = max(self._line[rank], now) + self._seconds[at]

    def _after_copies(self, now: float, waited: Iterable[int]) -> float:
        return max([now, *(self._ends[at] for at in waited)])


_Step = tuple[int, int, tuple[tuple[int, int], ...]]
"""A computation, a gather or a reduction: its rank, the number of its price, and its reads.

The reads: (number of an earlier step, number of a message) of all values that other ranks, or gathers, make.
"""


class _Price(NamedTuple):
    """The facts that all steps of one price share. `kind`: UNSHARD, REDUCE_GRAD, OVERLAP_F_B, or the kind of the only leaf."""

    kind: Kind
    leaves: tuple[tuple[int, Kind, bool], ...]  # the last: of a microbatch that has an R

    @property
    def is_collective(self) -> bool:
        return self.kind in PER_STAGE

    def seconds(self, costs: Costs) -> float:
        if self.is_collective:
            times = costs.gathers if self.kind is Kind.UNSHARD else costs.reductions
            return times[self.leaves[0][0]] if times else 0.0
        if self.kind is Kind.OVERLAP_F_B:
            return costs.together(self.leaves)
        stage, kind, ahead = self.leaves[0]
        return costs.stages[stage].of(kind, ahead)


class StepTimes:
    """A table, read once."""

    def __init__(self, schedule: Schedule) -> None:
        self._name, self._stages, self._ranks = schedule.name, schedule.stages, schedule.ranks
        numbers: dict[_Price, int] = {}
        self._steps: list[_Step] = []
        self._actions: list[Action] = []
        for rank, action, reads in _Reading(schedule).steps():
            number = numbers.setdefault(_price(action, schedule.recomputed_ahead), len(numbers))
            self._steps.append((rank, number, reads))
            self._actions.append(action)
        self._prices = list(numbers)
        self._collective = [price.is_collective for price in self._prices]
        self._counts = [Counter[int]() for _ in range(self._ranks)]
        for rank, price, _ in self._steps:
            self._counts[rank][price] += not self._collective[price]

    def seconds(self, costs: Costs, *, collectives: bool = True, copies: HostCopies | None = None) -> StepSpan:
        """The span of a step. `collectives`: with gathers and reductions; `copies`: of offloaded values."""
        check_stages(costs, self._name, self._stages)
        if costs.blocking or costs.overhead:
            raise ScheduleError("costs: graphpp.simulate has blocking messages and overhead, these step times have neither")
        took, lags = [price.seconds(costs) for price in self._prices], _lags(costs)
        if not collectives:
            took = [0.0 if own else each for each, own in zip(took, self._collective, strict=True)]
        busy = tuple(sum(took[price] * count for price, count in counts.items()) for counts in self._counts)
        return StepSpan(self._makespan(took, lags, copies), busy)

    def _makespan(self, took: Sequence[float], lags: Sequence[float], copies: HostCopies | None) -> float:
        """Gathers and reductions run one after the other while the rank computes; so do the copies."""
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
                there = ends[source] + lags[lag]
                if there > begin:  # faster than max(), and a search spends its time here
                    begin = there
            if copies is None:
                free[rank] = ends[at] = begin + seconds
            else:
                action = self._actions[at]
                free[rank] = ends[at] = copies.after(rank, action, copies.before(rank, action, begin) + seconds)
        return max(*free, *line, 0.0)


def check_stages(costs: Costs, name: str, stages: int) -> None:
    """Raise `ScheduleError` for costs of another number of stages than the schedule `name` has."""
    if len(costs.stages) != stages:
        given = f"the costs are for {len(costs.stages)} stages, but {name!r} has {stages}"
        raise ScheduleError(f"{given}; give the costs of each of its stages")


def _price(action: Action, ahead: Pairs) -> _Price:
    leaves = tuple([(leaf.stage, leaf.kind, leaf[:3:2] in ahead) for leaf in action.leaves])
    if action.kind is not Kind.RESHARD:
        return _Price(action.kind, leaves)
    return _Price(Kind.REDUCE_GRAD, ((action.stage, Kind.REDUCE_GRAD, False),))


def _lags(costs: Costs) -> list[float]:
    """The seconds of each message, at 2 x boundary + direction; the last entry stands for no message."""
    found: list[float] = []
    for boundary in range(len(costs.stages) - 1):
        found += [costs.message(costs.sends_forward, boundary), costs.message(costs.sends_backward, boundary)]
    return [*found, 0.0]


class _Reading:
    """The steps of a table in an order in which they can run, and the earlier steps that each of them reads."""

    def __init__(self, schedule: Schedule) -> None:
        self._rows = [[action for action in row if action is not None] for row in schedule.table]
        self._number, self._none = 0, 2 * (schedule.stages - 1)
        self._works = Works(schedule, "q", self._lag).on  # computations, by the number of their step; sends, of the one before
        self._reads: list[tuple[int, int]] = []  # of the cell that is about to run
        self._latest: list[int] = [0] * schedule.ranks
        self._gathers: list[dict[int, int]] = [{} for _ in schedule.table]  # by stage, for the next computation
        self._unreduced: list[set[int]] = [set() for _ in schedule.table]

    def _lag(self, send: Action | None) -> int:
        """The number of a message."""
        back = send is not None and send.kind is Kind.SEND_B
        return self._none if send is None else 2 * (send.stage - back) + back

    def steps(self) -> Iterator[tuple[int, Action, tuple[tuple[int, int], ...]]]:
        """(rank, action, reads) of all actions that take time. Raises `ScheduleError` for a table that stops before its end."""
        for rank, action in in_order(self._rows, self._ready):
            if self._takes_time(rank, action):
                yield rank, action, tuple(self._reads)
                self._number += 1

    def _ready(self, rank: int, action: Action) -> bool:
        """Whether all values are there; finds (step, message) of the remote values and gathers that a computation waits for."""
        reads, works, gathers, leaves = list[tuple[int, int]](), self._works[rank], self._gathers[rank], action.leaves
        for leaf in leaves:
            for records, lag, _ in works[leaf[:2]].needs:
                number = next((found for record in records if (found := record[leaf.microbatch or 0]) != PENDING), None)
                if number is None:
                    return False
                if lag != self._none:
                    reads.append((number, lag))
        if gathers and action.kind in COMPUTE:  # two leaves of one stage wait for one gather
            stages = dict.fromkeys(leaf.stage for leaf in leaves if leaf.stage in gathers)
            reads += [(gathers.pop(stage), self._none) for stage in stages]
        self._reads = reads
        return True

    def _takes_time(self, rank: int, action: Action) -> bool:
        """Whether an action is a step; records the place of each action."""
        if action.kind in COMPUTE:
            self._latest[rank] = self._number
            self._unreduced[rank].update(leaf.stage for leaf in action.leaves if leaf.kind in (Kind.B, Kind.W))
        if action.kind not in PER_STAGE:
            for leaf in action.leaves:
                self._works[rank][leaf[:2]].record[leaf.microbatch or 0] = self._latest[rank]
            return action.kind in COMPUTE
        if action.kind is Kind.UNSHARD:
            self._gathers[rank][action.stage] = self._number
            return True
        reduces = action.stage in self._unreduced[rank]
        self._unreduced[rank].discard(action.stage)
        return reduces
