"""The least offload, or the least recomputation, that makes a setting fit the memory of its ranks.

A larger fraction offloads a superset of the values, so no rank's bytes grow with it. Early ranks of 1F1B hold more
microbatches, so they recompute more; a rank recomputes the layers of its first stage first. Recomputation lengthens its stages,
so layers are rebalanced a few times by the seconds with recomputation, and the cut with the fastest slowest rank is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import gt, le

from graphpp.cluster_planner.plans.prediction.predict_step import peaks_of, tables_of
from graphpp.cluster_planner.plans.prediction.read_tables import ReadTable
from graphpp.cluster_planner.plans.prediction.single_layers import layers_of_stages, priced_on
from graphpp.cluster_planner.plans.refine.cut_by_memory import cut_by_memory
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.planner.balance import balanced_on
from graphpp.planner.segments import Cut
from graphpp.schedules.table.actions import Kind

_STEPS = 8  # of the offloaded fraction
_ROUNDS = 3  # cuts that are tried


def least_offload(request: PlanRequest, setting: PlanSetting, cap: int) -> PlanSetting | None:
    """The setting with the smallest offloaded fraction, in eighths, within `cap` bytes; None if all is not enough or the device
    has no host link. `setting` has no offload."""
    tables = tables_of(request, setting)
    if tables is None or request.machines.host is None:
        return None
    cut = request.of(setting).stages(setting).cut

    def offloading(step: int) -> PlanSetting:
        return replace(setting, offload=step / _STEPS if step else None)

    def fits(step: int) -> bool:
        peaks = peaks_of(request, offloading(step), cut, tables)
        return all(map(le, peaks, request.caps(setting.shape, cap)))

    return offloading(bisect_left(range(_STEPS), True, key=fits)) if fits(_STEPS) else None


def least_recompute(request: PlanRequest, setting: PlanSetting, cap: int) -> tuple[PlanSetting, Cut] | None:
    """The setting with the fewest recomputed layers per rank within `cap` bytes, and its cut; None if all is not enough or the
    model has no repeated layers. `setting` recomputes all layers ("selective" or "full")."""
    tables = tables_of(request, setting)
    if tables is None or not request.costs.layers:
        return None
    request = request.of(setting)
    cut = request.stages(replace(setting, recompute=None)).cut
    best: tuple[float, PlanSetting, Cut] | None = None
    for _ in range(_ROUNDS):
        found = _Ranks(request, setting, cut, tables).least(cap)
        if found is not None:
            slowest, seconds = _seconds(request, found, cut, tables[0])
            if best is None or slowest < best[0] * (1 - 1e-9):
                best = slowest, found, cut
        following = cut_by_memory(request, setting, cut) if found is None else balanced_on(seconds, request.groups(setting))
        if following is None or following == cut:
            break
        cut = following
    return None if best is None else best[1:]


def _seconds(request: PlanRequest, setting: PlanSetting, cut: Cut, table: ReadTable) -> tuple[float, list[list[float]]]:
    """For one microbatch: seconds of the slowest rank, and of each segment on each group of the machines."""
    groups = range(len(request.machines.groups))
    parts = [priced_on(request, setting, cut, group).segments.costs.stages for group in groups]
    each = [[part.of(Kind.F) + part.of(Kind.I) + part.of(Kind.W) for part in own] for own in parts]
    ranks, bounds = [0.0] * setting.shape.pp, pairwise((*cut, len(parts[0])))
    for stage, (group, (first, end)) in enumerate(zip(request.groups(setting), bounds, strict=True)):
        ranks[table.rank_of_stage[stage]] += sum(each[group][first:end])
    return max(ranks), each


class _Ranks:
    """The layers of each rank under one cut, in recomputation order."""

    def __init__(self, request: PlanRequest, setting: PlanSetting, cut: Cut, tables: Sequence[ReadTable]) -> None:
        self._request, self._setting, self._cut, self._tables = request, setting, cut, tables
        self._layers = [len(layers) for layers in layers_of_stages(request.of(setting).costs, cut)]
        rank_of = tables[0].rank_of_stage
        self._stages = [[stage for stage in sorted(rank_of) if rank_of[stage] == rank] for rank in range(setting.shape.pp)]

    def least(self, cap: int) -> PlanSetting | None:
        """Bisect the recomputed layers of all ranks in parallel: one rank's bytes do not depend on another's layers."""
        most = [sum(self._layers[stage] for stage in stages) for stages in self._stages]
        low, high = [-1] * len(most), list(most)  # on each rank `low` is too few, `high` is enough
        caps = self._request.caps(self._setting.shape, cap)
        if any(map(gt, self._peaks(high), caps)):
            return None
        while any(high[rank] - low[rank] > 1 for rank in range(len(most))):
            middle = [(few + enough) // 2 if enough - few > 1 else enough for few, enough in zip(low, high, strict=True)]
            for rank, peak in enumerate(self._peaks(middle)):
                (high if peak <= caps[rank] else low)[rank] = middle[rank]
        return self._with(high)

    def _peaks(self, counts: Sequence[int]) -> tuple[int, ...]:
        return peaks_of(self._request, self._with(counts), self._cut, self._tables)

    def _with(self, counts: Sequence[int]) -> PlanSetting:
        by_stage = [0] * len(self._layers)
        for rank, count in enumerate(counts):
            before = 0
            for stage in self._stages[rank]:
                by_stage[stage] = max(0, min(count - before, self._layers[stage]))
                before += self._layers[stage]
        if not any(by_stage):
            return replace(self._setting, recompute=None, recomputed=None)
        return replace(self._setting, recomputed=tuple(by_stage))
