"""The values for which the actions of a table wait, found once for each rank, stage and kind: all microbatches need the same.

A work is the actions of one stage and kind. `Work.record[microbatch]` says that an action has run: a number that the caller
chooses, 0 or more, and `PENDING` before. An action may run if each of its needs has an entry for its microbatch in one of the
need's records.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from typing import Any, NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import PER_STAGE, SENDS, Action, Kind, computations, inputs, message, peer
from graphpp.schedules.table.schedule import Schedule

PENDING = -1
Key = tuple[int, Kind]  # stage and kind
Record = MutableSequence[Any]  # numbers by microbatch


class Need(NamedTuple):
    """`lag`: of the message that follows the entry. `makers`: the computations of which any one makes the value."""

    records: tuple[Record, ...]
    lag: Any
    makers: tuple[Action, ...]


class Work(NamedTuple):
    record: Record
    needs: tuple[Need, ...]


class Works:
    """`on[rank]`: the works of a rank. Raises `ScheduleError` for a stage or a microbatch beyond the counts of the schedule."""

    def __init__(self, schedule: Schedule, kind: str, lag: Callable[[Action | None], Any], *, blocking: bool = False) -> None:
        """`kind`: of numbers, "d" or "q". `lag`: of a send, or of no message. `blocking`: a receive waits for its send."""
        _check_counts(schedule)
        self._schedule, self._lag, self._blocking = schedule, lag, blocking
        self.records = defaultdict[Key, Record](lambda: array(kind, [PENDING]) * schedule.microbatches)
        self.on: list[Mapping[Key, Work]] = [
            {key: Work(self.records[key], tuple(self._needs(rank, Action(*key, 0)))) for key in keys}
            for rank, keys in enumerate(schedule.works)
        ]

    def _needs(self, rank: int, leaf: Action) -> Iterator[Need]:
        if leaf.kind in SENDS:
            yield self._need(None, computations(leaf))
        elif leaf.is_communication and self._blocking:
            yield self._need(None, computations(peer(leaf)), peer(leaf))
        for makers in inputs(leaf, self._schedule.stages):
            here = self._schedule.rank_of_stage.get(makers[0].stage) == rank
            ends = None if here else message(makers[0], self._schedule.stages)
            send = None if ends is None else ends[0]
            if ends is None or not self._schedule.has_communication:
                yield self._need(send, makers)
            else:
                yield from (self._need(send, makers, send), self._need(None, makers, ends[1]))

    def _need(self, send: Action | None, makers: tuple[Action, ...], event: Action | None = None) -> Need:
        """The need of `event`, or of any of `makers`."""
        events = makers if event is None else (event,)
        return Need(tuple(self.records[each[:2]] for each in events), self._lag(send), makers)


def _check_counts(schedule: Schedule) -> None:
    stage = next((stage for stage in schedule.rank_of_stage if not 0 <= stage < schedule.stages), None)
    if stage is not None:
        raise ScheduleError(f"{schedule.name!r}: there is no stage {stage} of {schedule.stages}")
    leaves = (leaf for row in schedule.table for action in row if action for leaf in action.parts or (action,))
    odd = {leaf.microbatch for leaf in leaves if leaf.kind not in PER_STAGE} - set(range(schedule.microbatches))
    if odd:
        raise ScheduleError(f"{schedule.name!r}: there is no microbatch {odd.pop()} of {schedule.microbatches}")
