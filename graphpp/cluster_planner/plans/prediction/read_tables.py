"""The schedule tables under which settings are predicted; each is made and read once for all settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice, table_of
from graphpp.errors import ScheduleError
from graphpp.schedules.check.row_moments import Reading
from graphpp.schedules.check.shard_counts import ShardCounts, shard_counts
from graphpp.schedules.check.step_memory import StepMemory
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.simulate.step_time import StepTimes
from graphpp.schedules.table.costs import DEPTH, MessageFlow
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

FLOW = MessageFlow(kept=DEPTH)
"""Message buffering of NCCL between the ranks; receives stay where the table has them."""

_WHOLE = 3_000  # most computations of a step that is simulated in full
_TABLES = 128  # cached tables
_AGAIN = 100  # time of the first setting under a table over that of a further one
_BESIDE = 400  # computations whose simulation takes as long as pricing the stages
_READ_AGAIN = 3  # time of a least-offload search over that of making and reading a table
_FURTHER = 0.5  # of the granted work, added for settings under tables that were read before
_OF_FEW = 0.25  # of the granted work for tables, where there are few settings
_IN_GROUPS = ("Interleaved1F1B", "InterleavedZeroBubble", "MegatronInterleaved")  # groups of `ranks` or `group` microbatches
_MORE = 8  # further microbatches of the longer simulated step, if a schedule admits any number
_LEAST = 16  # microbatches of the shorter simulated step; also at least twice the ranks, so that the pipeline is full


class ReadTable(NamedTuple):
    """A table that the ranks run, read for its seconds and bytes. `most`: counts of the rank with most gathers."""

    schedule: Schedule
    rank_of_stage: Mapping[int, int]
    times: StepTimes
    memory: StepMemory
    most: ShardCounts
    reading: Reading

    def offloading(self, windows: Sequence[OffloadWindow]) -> StepMemory:
        """The table read for bytes with these values offloaded."""
        return StepMemory(self.schedule, replace(self.reading, offloaded=windows))


@lru_cache(_TABLES)
def read_table(choice: ScheduleChoice, ranks: int, microbatches: int, keep: int | None, sharded: bool) -> ReadTable | None:
    """The table that the ranks run; None if the schedule does not admit these numbers."""
    sent = _sent(choice, ranks, microbatches)
    if sent is None:
        return None
    try:
        table = place_shards(sent, keep) if sharded else sent
    except ScheduleError:  # an overlapped action needs more whole stages than `keep`
        return None
    most = max(shard_counts(table), key=lambda each: each.gathers_per_stage)
    reading = Reading([0] * microbatches, FLOW.kept, keep != 0, layers=sharded and keep == 0)
    return ReadTable(table, table.rank_of_stage, StepTimes(table), StepMemory(table, reading), most, reading)


@lru_cache(_TABLES)
def _sent(choice: ScheduleChoice, ranks: int, microbatches: int) -> Schedule | None:
    plain = table_of(choice, ranks, microbatches)
    return plain if plain is None or plain.has_communication else add_send_recv(plain)


def counts_of(setting: PlanSetting) -> tuple[int, ...]:
    """The numbers of microbatches to simulate: the setting's own, or two smaller ones that the schedule admits too."""
    unit = setting.schedule.group or setting.shape.pp
    fills = setting.shape.pp * (1 if setting.schedule.name == "1F1B" else 2)  # 1F1B has at most `ranks` in flight
    first = -(-max(_LEAST, fills) // unit) * unit
    second = first + (unit if setting.schedule.name in _IN_GROUPS else min(unit, _MORE))
    whole = 3 * setting.stages * setting.microbatches
    if whole <= _WHOLE or setting.schedule.order is not None or second >= setting.microbatches:
        return (setting.microbatches,)
    return first, second


class Work:
    """A budget for predictions, counted in computations rather than seconds, so equal on every machine. `tables`: for settings
    whose tables are not read yet; `further`: for settings whose tables are read or short. `few`: whether settings are few."""

    def __init__(self, few: bool = False) -> None:
        self.tables = self.further = 0
        self._few, self._read = few, set[object]()

    def grant(self, work: int) -> None:
        """Replace the remaining work."""
        self.tables, self.further = round(work * _OF_FEW) if self._few else work, round(work * _FURTHER)

    def take(self, setting: PlanSetting, times: int = 1) -> bool:
        """Take the work of simulating a setting `times` times; False if too little is left."""
        counts = counts_of(setting)
        key = setting.schedule, setting.shape.pp, counts, setting.keep
        total = sum(3 * setting.stages * count for count in counts)
        once = times * (_BESIDE + total // _AGAIN)
        if key in self._read or total <= _BESIDE:
            if self.further <= 0:
                return False
            self.further -= once
        elif self.tables <= 0:
            return False
        else:
            self.tables -= total + once
            self._read.add(key)
        return True

    def read_again(self, setting: PlanSetting) -> bool:
        """Take the work of a least-offload search, which reads tables several times; False if too little is left."""
        if self.tables <= 0:
            return False
        self.tables -= _READ_AGAIN * sum(3 * setting.stages * count for count in counts_of(setting))
        return True

    @property
    def over(self) -> bool:
        return self.tables <= 0 and self.further <= 0
