"""Move the starts of a plan's stages: a cut with a faster step than the most balanced one, under the plan's own table.

Which stages share a rank decides what an OVERLAP_F_B hides, and which stages are beside each other decides who waits: the
simulator knows both, `balance.py` neither. During the search a cut has the seconds of its computations and messages. If the cut
found needs too many bytes, the search repeats, and counts the bytes of each cut that is the fastest so far. A prediction of the
whole step decides in the end. The result is None if no cut within the cap is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, continued, peaks_of, predict, tables_of
from graphpp.cluster_planner.plans.prediction.read_tables import ReadTable, counts_of
from graphpp.cluster_planner.plans.prediction.single_layers import LayerGathers, layers_of_stages, priced_setting
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.devices import Machines
from graphpp.planner.auto_split import CutSearch, Value, rounded
from graphpp.planner.segments import Cut
from graphpp.schedules.table.costs import Costs, StageCosts

_WORK = 1_000_000  # simulated computations of one plan's search
_COUNTED = 16  # cuts whose bytes one search counts


def moved_stages(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    setting, own = found.setting, request.of(found.setting)
    tables = tables_of(request, setting)
    machines = request.machines.groups
    if tables is None or setting.shape.pp == 1 or len(machines) > 1:  # on unlike devices, its stage decides a segment's price
        return None
    starts, (before, after) = own.costs.starts, own.fixed
    fixed = starts[1 : before + 1], starts[len(starts) - after :]
    most = _WORK // sum(3 * setting.stages * count for count in counts_of(setting))
    for capped in (False, True):
        cuts = _Cuts(own, found, cap if capped else None, tables, machines[0])
        search = CutSearch(cuts.priced.segments, tables[0].schedule, lambda state: (), None, fixed, cuts.value, most)
        cut = search.moved(found.cut)
        better = predict(request, setting, cut) if cut != found.cut else None
        if better is None:
            return None
        if better.over(cap) <= 0 and better.host <= request.machines.host_memory:
            return replace(better, moved=1 - better.seconds.total / found.seconds.total)
    return None


class _Cuts:
    """The values of cuts under the tables of a setting; with a cap, while no faster cut within the cap is known."""

    def __init__(
        self, request: PlanRequest, found: Prediction, cap: int | None, tables: Sequence[ReadTable], machines: Machines
    ) -> None:
        self._machines = [machines] * found.setting.stages
        self._request, self._setting, self._cap, self._tables = request, found.setting, cap, tables
        self.priced = priced_setting(request, found.setting, found.cut)
        self._fastest, self._left = inf, _COUNTED
        send, stride = machines.send, found.setting.shape.stride("pp")
        crossing = self.priced.forward_bytes, self.priced.backward_bytes
        self._sends = [[send(nbytes, stride) for nbytes in each] for each in crossing]
        self._stage = cache(self.priced.segments.stage)

    def value(self, cut: Cut) -> Value:
        if any(few < many for few, many in zip(self._layers(cut), self._setting.recomputed or (), strict=False)):
            return inf, inf, 0
        costs, counts = self._costs(cut), counts_of(self._setting)
        spans = [table.times.seconds(costs, collectives=False).makespan for table in self._tables]
        seconds = rounded(continued(counts, self._setting.microbatches)(spans[0], spans[-1]))
        if self._cap is None or seconds >= self._fastest:
            return 0, seconds, 0
        if self._left == 0:
            return inf, inf, 0
        self._left -= 1
        lacking = max(0, max(peaks_of(self._request, self._setting, cut, self._tables)) - self._cap)
        self._fastest = self._fastest if lacking else seconds
        return lacking, seconds, 0

    def _layers(self, cut: Cut) -> list[int]:
        return [len(layers) for layers in layers_of_stages(self._request.costs, cut)]

    def _costs(self, cut: Cut) -> Costs:
        priced, keep = self.priced, self._setting.keep
        if self._setting.recomputed is not None:  # which layers are recomputed depends on the cut
            priced = priced_setting(self._request, self._setting, cut)
        segments, ends = priced.segments, [*cut[1:], len(priced.segments.starts)]
        stage = self._stage if priced is self.priced else segments.stage
        stages: tuple[StageCosts, ...] = tuple(map(stage, cut, ends))
        on, back = (tuple(each[first - 1] for first in cut[1:]) for each in self._sends)
        costs = replace(segments.costs, stages=stages, sends_forward=on, sends_backward=back)
        if keep == 0:
            gathers = LayerGathers(self._machines, self._setting.shape, priced, cut, self._request.reduced_width)
            return gathers.costs(costs.in_sequence)
        return costs
