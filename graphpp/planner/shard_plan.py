"""The plan of sharded parameters: gathers, reductions and bytes sent in a step. `memory_plan.py` has the bytes in memory.

Contract
    in   the bytes that a rank sends when a stage is gathered, and when it is reduced; the table that the ranks run; the number
         of shards
    out  `ShardPlan`: for each rank of the pipeline what it sends; in words, with another schedule where this one gathers a
         stage more than twice
    Parameters of several stages count in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpp.errors import ScheduleError
from graphpp.schedules.check.shard_counts import ShardCounts, shard_counts
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes

_BREADTH_FIRST = "LoopedBFS"
_OFTEN = 2  # gathers of a stage in a step


@dataclass(frozen=True)
class RankShards:
    """One rank's step: how often a stage is gathered and reduced, and the bytes that the rank sends for it."""

    rank: int
    gathers: float
    reductions: float
    sent: int

    @property
    def words(self) -> str:
        """One line."""
        return (
            f"rank {self.rank}: a stage is gathered {self.gathers:g} times and reduced {self.reductions:g} times a step; "
            f"dp_shard sends {spell_bytes(self.sent)}"
        )


@dataclass(frozen=True)
class ShardPlan:
    """The cost of sharding over `shards` ranks. `advice`: a schedule with fewer gathers, or ""."""

    shards: int
    ranks: tuple[RankShards, ...]
    advice: str = ""

    @classmethod
    def of(
        cls, running: Schedule, gathered: Sequence[float], reduced: Sequence[float], shards: int, keep: int | None
    ) -> ShardPlan:
        """The plan of a table with the actions of sharded stages; bytes sent by stage."""
        counts = shard_counts(running)
        ranks = [
            RankShards(rank, each.gathers_per_stage, each.reductions_per_stage, round(each.sent(gathered, reduced)))
            for rank, each in enumerate(counts)
        ]
        return cls(shards, tuple(ranks), _advice(running, counts, keep))

    def __str__(self) -> str:
        """A line per rank, and the advice."""
        lines = [each.words for each in self.ranks]
        return "\n".join([f"parameters sharded over {self.shards} ranks", *lines, *filter(None, [self.advice])])


def _advice(running: Schedule, counts: Sequence[ShardCounts], keep: int | None) -> str:
    """The gathers of the breadth-first schedule, where this one gathers a stage more than twice."""
    most = max((each.gathers_per_stage for each in counts), default=0.0)
    if most <= _OFTEN or keep is None:
        return ""
    try:
        other = make_table(_BREADTH_FIRST, running.ranks, running.stages, running.microbatches)
    except ScheduleError:  # there is no such table for these counts, so it is no advice
        return ""
    fewer = max(each.gathers_per_stage for each in shard_counts(place_shards(other, keep)))
    found = f"keep={keep} gathers a stage up to {most:g} times a step under {running.name}"
    if fewer >= most:
        return f"{found}: a larger keep gathers less often"
    return f"{found}; schedule={_BREADTH_FIRST!r} would gather {fewer:g} times, and keep the activations of all microbatches"
