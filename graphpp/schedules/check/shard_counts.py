"""Counts of a table with sharded stages: gathers and reductions of each stage, and how much is whole at once.

Contract
--------
    in    a table with UNSHARD, RESHARD and REDUCE_GRAD (`rewrite/place_shards.py`); bytes, or any other size, of each stage
    out   for each rank what its row does in one step

A stage's parameters are whole from UNSHARD to RESHARD. Its whole gradients stand from its first B or W on until they are
reduced: at REDUCE_GRAD, and at each RESHARD that follows a B or W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Row, Schedule

_MAKES_GRADIENTS = (Kind.B, Kind.W)


@dataclass(frozen=True)
class ShardCounts:
    """One rank's row. `gathers`, `reductions`: how often in a step, by stage; `whole`, `gradients`: the most at once."""

    gathers: Counter[int]
    reductions: Counter[int]
    whole: float
    gradients: float

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


def shard_counts(
    table: Schedule, weights: Sequence[float] | None = None, gradients: Sequence[float] | None = None
) -> tuple[ShardCounts, ...]:
    """The counts of each rank. `weights`, `gradients`: the size of each stage's; None: every stage counts 1."""
    sizes = [[1.0] * table.stages if each is None else each for each in (weights, gradients)]
    return tuple(_of_row(row, *sizes) for row in table.table)


def _of_row(row: Row, weights: Sequence[float], gradients: Sequence[float]) -> ShardCounts:
    gathers, reductions = Counter[int](), Counter[int]()
    whole, unreduced = set[int](), set[int]()
    most_whole = most_unreduced = 0.0
    for leaf in (leaf for action in row if action is not None for leaf in action.leaves):
        if leaf.kind is Kind.UNSHARD:
            gathers[leaf.stage] += 1
            whole.add(leaf.stage)
            most_whole = max(most_whole, sum(weights[each] for each in whole))
        elif leaf.kind in _MAKES_GRADIENTS and leaf.stage not in unreduced:
            unreduced.add(leaf.stage)
            most_unreduced = max(most_unreduced, sum(gradients[each] for each in unreduced))
        elif leaf.kind in (Kind.RESHARD, Kind.REDUCE_GRAD) and leaf.stage in unreduced:
            reductions[leaf.stage] += 1
            unreduced.remove(leaf.stage)
        if leaf.kind is Kind.RESHARD:
            whole.remove(leaf.stage)
    return ShardCounts(gathers, reductions, most_whole, most_unreduced)
