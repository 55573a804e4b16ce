"""The peak bytes of activations on each rank, from the table alone: lifetimes depend on the order, not on the times.

Contract
    A rank's row is walked in order with the bytes of `graphpp.schedules.table.costs`: the activations of a stage's microbatch
    live from the start of its F to the end of its B, or to the end of its I and in part to the end of its W. An overlap is
    one instant: the bytes of all its parts are alive together. A forward without a backward keeps nothing after its end.
    Offloaded bytes are not alive from the end of a window's `evict_after` to the start of its `prefetch_at`. The memory
    curve of the simulator has the same peaks, since a rank runs one action at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graphpp.arguments import Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import SCHEDULE, Row, Schedule


class Peak(NamedTuple):
    """The most bytes alive at once on a rank, and the first column in which so many are alive."""

    rank: int
    column: int
    nbytes: int


MicrobatchCosts = Costs | Sequence[Costs]
"""The costs of all microbatches, or one for each microbatch."""


EACH_COSTS = Accepted(
    "a graphpp.Costs, or a list of them, one for each microbatch",
    lambda value: isinstance(value, Costs)
    or (isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, Costs) for each in value)),
)


WINDOWS = Accepted(
    "a list of OffloadWindow",
    lambda value: isinstance(value, list | tuple) and all(isinstance(each, OffloadWindow) for each in value),
)


@checked(ScheduleError, schedule=SCHEDULE, costs=EACH_COSTS, offloaded=WINDOWS)
def peak_bytes(schedule: Schedule, costs: MicrobatchCosts, offloaded: Sequence[OffloadWindow] = ()) -> tuple[int, ...]:
    """The most bytes of activations alive at once on each rank."""
    return tuple(peak.nbytes for peak in peaks(schedule, costs, offloaded))


def peaks(schedule: Schedule, costs: MicrobatchCosts, offloaded: Sequence[OffloadWindow] = ()) -> tuple[Peak, ...]:
    """The peak of each rank. Raises `ScheduleError` if `costs` has another number of stages, or of microbatches."""
    live = live_activations(schedule, costs, offloaded)
    return tuple(_peak(rank, each) for rank, each in enumerate(live))


def live_activations(
    schedule: Schedule, costs: MicrobatchCosts, offloaded: Sequence[OffloadWindow] = ()
) -> tuple[Iterator[tuple[int, int]], ...]:
    """For each rank (column, bytes of activations alive), while each action runs and after it. Raises the errors of `peaks`."""
    each = [costs] * schedule.microbatches if isinstance(costs, Costs) else list(costs)
    if len(each) != schedule.microbatches:
        raise ScheduleError(f"schedule {schedule.name!r} has {schedule.microbatches} microbatches, the costs {len(each)}")
    for known in each:
        if len(known.stages) != schedule.stages:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.stages} stages, the costs are of {len(known.stages)}; "
                "give the costs of each stage"
            )
    evicted, prefetched = _moved(offloaded)
    return tuple(_live(row, each, evicted, prefetched) for row in schedule.table)


def _moved(offloaded: Sequence[OffloadWindow]) -> tuple[Counter[Action], Counter[Action]]:
    """The bytes evicted at the end of an action, and those prefetched at the start of one."""
    evicted, prefetched = Counter[Action](), Counter[Action]()
    for window in offloaded:
        evicted[window.evict_after] += window.nbytes
        prefetched[window.prefetch_at] += window.nbytes
    return evicted, prefetched


def _peak(rank: int, live: Iterator[tuple[int, int]]) -> Peak:
    found = Peak(rank, 0, 0)
    for column, nbytes in live:
        if nbytes > found.nbytes:
            found = Peak(rank, column, nbytes)
    return found


def _live(
    row: Row, costs: Sequence[Costs], evicted: Mapping[Action, int], prefetched: Mapping[Action, int]
) -> Iterator[tuple[int, int]]:
    """(column, bytes alive) while each action runs, and after it."""
    kept = _ByteChanges(row, costs)
    live = 0
    for column, action in enumerate(row):
        changes = [kept.change(leaf) for leaf in action.leaves] if action is not None and action.is_compute else []
        live += sum(start for start, _ in changes) + (prefetched.get(action, 0) if action is not None else 0)
        yield column, live
        live += sum(end for _, end in changes) - (evicted.get(action, 0) if action is not None else 0)
        yield column, live


class _ByteChanges:
    """The change of a rank's live bytes at the start and the end of each computation."""

    def __init__(self, row: Row, costs: Sequence[Costs]) -> None:
        leaves = (leaf for action in row if action is not None for leaf in action.leaves)
        self._followed = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.B, Kind.I)}
        self._costs = costs

    def change(self, leaf: Action) -> tuple[int, int]:
        """(bytes more at the start of a computation, bytes more at its end); negative where bytes are freed."""
        stage = self._costs[leaf.microbatch or 0].stages[leaf.stage]
        return stage.change(leaf.kind, (leaf.stage, leaf.microbatch) in self._followed)
