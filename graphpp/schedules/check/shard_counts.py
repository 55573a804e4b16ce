"""How often a rank gathers and reduces its sharded stages in a step of a table (`rewrite/place_shards.py`).

A stage is gathered at each UNSHARD. Its gradients, made by a B or W, are reduced at the next REDUCE_GRAD or RESHARD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Row, Schedule


@dataclass(frozen=True)
class ShardCounts:
    """One rank's row. `gathers`, `reductions`: how often in a step, by stage."""

    gathers: Counter[int]
    reductions: Counter[int]

    @property
    def gathers_per_stage(self) -> float:
        """The mean over the rank's stages."""
        return self.gathers.total() / max(len(self.gathers), 1)

    @property
    def reductions_per_stage(self) -> float:
        """The mean over the rank's stages that have gradients; 0 without any."""
        return self.reductions.total() / max(len(self.reductions), 1)

    def sent(self, gathered: Sequence[float], reduced: Sequence[float]) -> float:
        """The bytes that the rank sends along the mesh in a step. By stage: the bytes sent in a gather and in a reduction."""
        of_gathers = sum(times * gathered[stage] for stage, times in self.gathers.items())
        return of_gathers + sum(times * reduced[stage] for stage, times in self.reductions.items())


def shard_counts(table: Schedule) -> tuple[ShardCounts, ...]:
    return tuple(map(_of_row, table.table))


def _of_row(row: Row) -> ShardCounts:
    gathers, reductions, unreduced = Counter[int](), Counter[int](), set[int]()
    for leaf in (leaf for action in row if action is not None for leaf in action.leaves):
        if leaf.kind is Kind.UNSHARD:
            gathers[leaf.stage] += 1
        elif leaf.kind in (Kind.B, Kind.W):
            unreduced.add(leaf.stage)
        elif leaf.kind in (Kind.RESHARD, Kind.REDUCE_GRAD) and leaf.stage in unreduced:
            reductions[leaf.stage] += 1
            unreduced.remove(leaf.stage)
    return ShardCounts(gathers, reductions)
