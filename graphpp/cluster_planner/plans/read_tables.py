"""The tables under which settings are predicted: each is made and read once, and then serves all settings that run it.

Contract
    `counts_of(setting)`: the numbers of microbatches to simulate. `read_table(..)`: a table read for seconds and bytes, None
    where the schedule does not take the numbers. `Work` counts the cost of predictions, alike on every machine
"""

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
"""How long NCCL holds the messages of a cluster's ranks: a receive stands where the table has it."""

_WHOLE = 3_000  # computations of a step that is simulated as a whole
_TABLES = 128  # tables that are kept
_AGAIN = 100  # times as long as a further setting under the same table takes its first one
_BESIDE = 400  # computations of a table that take as long as the costs of the stages
_READ_AGAIN = 3  # times as long as to make and read a table the search of the least offload takes
_FURTHER = 0.5  # of the work that is granted, in addition: for settings under tables that are read already
_IN_GROUPS = ("Interleaved1F1B", "InterleavedZeroBubble", "MegatronInterleaved")  # of microbatches, as many as ranks or given
_MORE = 8  # microbatches of the longer simulated step, where a schedule takes any number
_LEAST = 16  # microbatches of the shorter simulated step; twice as many as ranks at least: then no schedule still fills up


class ReadTable(NamedTuple):
    """A table that the ranks run, read for its seconds and bytes.

    `most`: the counts of the rank with most gathers. `reading`: as the table was read for bytes.
    """

    schedule: Schedule
    rank_of_stage: Mapping[int, int]
    times: StepTimes
    memory: StepMemory
    most: ShardCounts
    reading: Reading

    def offloading(self, windows: Sequence[OffloadWindow]) -> StepMemory:
        """The table, read for bytes of which some are in the host's memory for a while."""
        return StepMemory(self.schedule, replace(self.reading, offloaded=windows))


@lru_cache(_TABLES)
def read_table(choice: ScheduleChoice, ranks: int, microbatches: int, keep: int | None, sharded: bool) -> ReadTable | None:
    """The table that the ranks run, or None where there is none for these numbers."""
    plain = table_of(choice, ranks, microbatches)
    if plain is None:
        return None
    sent = plain if plain.has_communication else add_send_recv(plain)
    try:
        table = place_shards(sent, keep) if sharded else sent
    except ScheduleError:  # an overlapped action needs more stages at once
        return None
    most = max(shard_counts(table), key=lambda each: each.gathers_per_stage)
    reading = Reading([0] * microbatches, FLOW.kept, keep != 0, layers=sharded and keep == 0)
    return ReadTable(table, table.rank_of_stage, StepTimes(table), StepMemory(table, reading), most, reading)


def counts_of(setting: PlanSetting) -> tuple[int, ...]:
    """The numbers of microbatches to simulate: the number itself, or two smaller ones that the schedule takes as well."""
    unit = setting.schedule.group or setting.shape.pp
    fills = setting.shape.pp * (1 if setting.schedule.name == "1F1B" else 2)  # 1F1B has at most as many under way as ranks
    first = -(-max(_LEAST, fills) // unit) * unit
    second = first + (unit if setting.schedule.name in _IN_GROUPS else min(unit, _MORE))
    whole = 3 * setting.stages * setting.microbatches
    if whole <= _WHOLE or setting.schedule.order is not None or second >= setting.microbatches:
        return (setting.microbatches,)
    return first, second


class Work:
    """A budget for predictions, counted in the computations of tables that are read for the first time, not in seconds.

    `tables`: left for settings under tables that were not read yet; `further`: for those under tables that were, or are short.
    """

    def __init__(self) -> None:
        self.tables = self.further = 0
        self._read = set[object]()

    def grant(self, work: int) -> None:
        """Allow so much work in place of the rest."""
        self.tables, self.further = work, round(work * _FURTHER)

    def take(self, setting: PlanSetting, times: int = 1) -> bool:
        """Take the work of a setting that is simulated so many times; False where too little is left."""
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
        """Take the work of a setting whose tables are read for bytes some times more; False where too little is left."""
        if self.tables <= 0:
            return False
        self.tables -= _READ_AGAIN * sum(3 * setting.stages * count for count in counts_of(setting))
        return True

    @property
    def over(self) -> bool:
        return self.tables <= 0 and self.further <= 0
