"""The peak of all bytes on each rank in a step: parameters, gradients, optimizer, buffers, messages, activations.

- In: the table that the ranks run (sharded stages have UNSHARD, RESHARD and REDUCE_GRAD), the costs of its microbatches, and
  each rank's state (`table/state_bytes.py`; without it only activations and messages between stages count).
- Out: for each rank the column with the most bytes alive, and these bytes by kind; `check_memory` refuses a table that takes
  more than a cap. Lifetimes are those of `lifetimes.py`; the gradients are finished at the last column.
- A table that is read once (`StepMemory`) answers for further costs in microseconds: its bytes are one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graphpp.arguments import Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.schedules.check.lifetimes import KINDS, item_bytes, state_bytes
from graphpp.schedules.check.row_moments import Reading, RowMoments
from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import SCHEDULE, Schedule
from graphpp.schedules.table.state_bytes import HeldBytes

_LARGE = 2**62  # from here on Python's integers are used

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


class StepPeak(NamedTuple):
    """The most bytes alive at once on a rank: the first column with so many, and the bytes by kind there.

    `most`: by kind, the most bytes at any time before the gradients are finished, not all at the same time.
    """

    rank: int
    column: int
    parts: Mapping[str, int]
    most: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """`5 bytes are alive here (2 of weights, 3 of activations)`; of one kind: `3 bytes of activations are alive here`."""
        parts = {kind: nbytes for kind, nbytes in self.parts.items() if nbytes}
        if len(parts) == 1:
            return f"{self.nbytes:,} bytes of {next(iter(parts))} are alive here"
        return f"{self.nbytes:,} bytes are alive here ({', '.join(f'{nbytes:,} of {kind}' for kind, nbytes in parts.items())})"


class StepMemory:
    def __init__(self, table: Schedule, reading: Reading | None = None) -> None:
        """Without `reading`, all microbatches have the same costs, sent values are not kept, and overlapped parts are woven."""
        self._table, self._reading = table, reading or Reading([0] * table.microbatches)
        self._rows = [RowMoments(row, table, self._reading) for row in table.table]

    def peaks(self, costs: Sequence[Costs], held: Sequence[HeldBytes] = ()) -> tuple[StepPeak, ...]:
        """The peak of each rank; `costs`: the distinct ones. Raises `ScheduleError` for other stages, ranks or readings."""
        return tuple(each.peak(rank) for rank, each in enumerate(self._ranks(costs, held)))

    def bytes_by_column(
        self, costs: Sequence[Costs], held: Sequence[HeldBytes] = ()
    ) -> tuple[Iterator[tuple[int, dict[str, int]]], ...]:
        """Per rank (column, bytes by kind): before the row, during and after each action, and at the end of the step."""
        return tuple(each.by_column() for each in self._ranks(costs, held))

    def _ranks(self, costs: Sequence[Costs], held: Sequence[HeldBytes]) -> list[_RankBytes]:
        table, reading = self._table, self._reading
        if held and len(held) != table.ranks:
            raise ScheduleError(f"held has the bytes of {len(held)} ranks, but {table.ranks} run {table.name!r}")
        for each in costs:
            if len(each.stages) != table.stages:
                raise ScheduleError(f"schedule {table.name!r} has {table.stages} stages, the costs are of {len(each.stages)}")
        like = all(each.flow.kept == reading.kept for each in costs) and any(each.woven for each in costs) == reading.woven
        if not like or (any(each.layers for each in held) and not reading.layers):
            raise ScheduleError(f"schedule {table.name!r} was read for another flow, other overlaps, or no single layers")
        for stage, microbatch in table.recomputed_ahead:
            costs[reading.costs_of[microbatch]].stages[stage].of(Kind.R)  # raises ScheduleError if the costs have none
        states = held or [HeldBytes()] * table.ranks
        return [_RankBytes(row, costs, own) for row, own in zip(self._rows, states, strict=True)]


def step_peaks(
    table: Schedule, costs: MicrobatchCosts, held: Sequence[HeldBytes] = (), offloaded: Sequence[OffloadWindow] = ()
) -> tuple[StepPeak, ...]:
    """The peak of each rank. Raises `ScheduleError` for costs of other stages or microbatches, or `held` of other ranks."""
    memory, distinct = _read(table, costs, held, offloaded)
    return memory.peaks(distinct, held)


def step_bytes(
    table: Schedule, costs: MicrobatchCosts, held: Sequence[HeldBytes] = (), offloaded: Sequence[OffloadWindow] = ()
) -> tuple[Iterator[tuple[int, dict[str, int]]], ...]:
    memory, distinct = _read(table, costs, held, offloaded)
    return memory.bytes_by_column(distinct, held)


def step_totals(table: Schedule, rank: int, costs: Costs) -> list[int]:
    """The bytes of activations and messages on a rank before its row, while each action runs, and after it."""
    reading = Reading([0] * table.microbatches, costs.flow.kept, costs.woven)
    return _RankBytes(RowMoments(table.table[rank], table, reading), [costs], HeldBytes()).totals()


def check_memory(
    subject: ScheduleUnderCheck,
    costs: MicrobatchCosts,
    cap: int | Sequence[int],
    offloaded: Sequence[OffloadWindow] = (),
    held: Sequence[HeldBytes] = (),
) -> None:
    """Raise `ScheduleError` at the peak of a rank with more than `cap` bytes alive; `cap`: for all ranks, or one for each."""
    caps = [cap] * subject.schedule.ranks if isinstance(cap, int) else list(cap)
    if len(caps) != subject.schedule.ranks:
        raise ScheduleError(f"memory_cap has bytes for {len(caps)} ranks, but {subject.schedule.ranks} run the schedule")
    for peak, most in zip(step_peaks(subject.schedule, costs, held, offloaded), caps, strict=True):
        if peak.nbytes > most:
            what = f"{peak}, more than the cap of {most:,}"
            raise subject.refusal(Position(peak.rank, peak.column), what, _remedy(peak))


def _remedy(peak: StepPeak) -> str:
    """The changes that take fewer bytes of activations, and of the state if there is any."""
    if not any(nbytes for kind, nbytes in peak.parts.items() if kind != "activations"):
        return "run a backward, or a held back W, earlier, or forwards later, or recompute in these stages"
    return (
        "for fewer activations take another schedule (V-Min, 1F1B), recompute (memory.recompute) or smaller microbatches; for "
        "fewer weights and gradients more stages on more ranks, or shards (dp_shard) with a smaller parallel.keep; if the "
        "optimizer keeps other bytes, say so in memory.optimizer"
    )


@checked(ScheduleError, schedule=SCHEDULE, costs=EACH_COSTS, offloaded=WINDOWS)
def peak_bytes(schedule: Schedule, costs: MicrobatchCosts, offloaded: Sequence[OffloadWindow] = ()) -> tuple[int, ...]:
    """The most bytes of activations, and of messages between stages, alive at once on each rank."""
    return tuple(peak.nbytes for peak in step_peaks(schedule, costs, offloaded=offloaded))


def _read(
    table: Schedule, costs: MicrobatchCosts, held: Sequence[HeldBytes], offloaded: Sequence[OffloadWindow]
) -> tuple[StepMemory, list[Costs]]:
    """The table, read for these costs, and the distinct costs."""
    each = [costs] * table.microbatches if isinstance(costs, Costs) else list(costs)
    if len(each) != table.microbatches:
        raise ScheduleError(f"schedule {table.name!r} has {table.microbatches} microbatches, the costs {len(each)}")
    distinct, numbers = [costs] if isinstance(costs, Costs) else list[Costs](), dict[int, int]()
    for one in each:
        if id(one) not in numbers:
            numbers[id(one)] = next((at for at, known in enumerate(distinct) if known == one), len(distinct))
            distinct += [one] if numbers[id(one)] == len(distinct) else []
    reading = Reading(
        [numbers[id(one)] for one in each],
        max((one.flow.kept for one in distinct), default=0),
        any(one.woven for one in distinct),
        layers=any(one.layers for one in held),
        offloaded=offloaded,
    )
    return StepMemory(table, reading), distinct


class _RankBytes:
    """The bytes of all moments of a rank."""

    def __init__(self, row: RowMoments, costs: Sequence[Costs], held: HeldBytes) -> None:
        self._row, self._held = row, held
        items = [each for one in costs for stage in row.stages for each in item_bytes(one.stages[stage], row.ahead)]
        states = [state_bytes(state, held) for state in row.states]
        most = sum(items) * int(row.live.max(initial=0)) + max(map(sum, states))
        dtype = np.int64 if most < _LARGE and all(type(each) is int for each in items) else object
        nbytes: npt.NDArray[Any] = np.array(items, dtype=dtype)
        messages = np.array(row.messages, dtype=bool)
        self._changing = np.array(states, dtype=dtype)[row.state]
        self._changing[:, KINDS.index("messages")] += row.live @ np.where(messages, nbytes, 0)
        self._activations = row.live @ np.where(messages, 0, nbytes) - row.away
        self._together = self._changing.sum(axis=1) + self._activations

    def peak(self, rank: int) -> StepPeak:
        columns, moments = self._row.places
        first = int(self._together[moments].argmax())
        column, moment = int(columns[first]), int(moments[first])
        parts, end = self._parts(moment), self._at_end()
        if sum(end.values()) > sum(parts.values()):
            column, parts = max(len(self._row.columns) - 1, 0), end
        most = {**dict(zip(KINDS, self._changing.max(axis=0), strict=True)), "activations": self._activations.max()}
        standing = self._held.standing
        return StepPeak(rank, column, parts, {kind: standing.get(kind, 0) + int(most.get(kind, 0)) for kind in parts})

    def totals(self) -> list[int]:
        """All bytes before the row, and twice for each column."""
        together: list[int] = self._together.tolist()
        return [together[moment] for _, moment in self._by_column()]

    def by_column(self) -> Iterator[tuple[int, dict[str, int]]]:
        """(column, bytes by kind) before the row, twice for each column, and at the end of the step."""
        yield from ((column, self._parts(moment)) for column, moment in self._by_column())
        yield max(len(self._row.columns) - 1, 0), self._at_end()

    def _by_column(self) -> Iterator[tuple[int, int]]:
        """(column, moment): the start; for each column the moment with most bytes while its action runs, then the end."""
        yield 0, 0
        for column, (during, after) in enumerate(self._row.columns):
            yield column, during[0] if len(during) == 1 else max(during, key=self._together.__getitem__)
            yield column, after

    def _parts(self, moment: int) -> dict[str, int]:
        """All bytes alive, by kind."""
        return self._with(map(int, self._changing[moment])) | {"activations": int(self._activations[moment])}

    def _at_end(self) -> dict[str, int]:
        """All bytes alive while the gradients of the step are finished, after all messages between stages."""
        found = self._with(state_bytes(self._row.states[self._row.state[self._row.last]], self._held))
        found["gradients"] += self._held.at_end
        if self._held.averaged:  # all of them are under way
            found["messages"] = sum(self._held.averaged.values())
        return found | {"activations": 0}

    def _with(self, changing: Iterable[int]) -> dict[str, int]:
        found = dict(self._held.standing)
        for kind, nbytes in zip(KINDS, changing, strict=True):
            found[kind] = found.get(kind, 0) + nbytes
        return found
