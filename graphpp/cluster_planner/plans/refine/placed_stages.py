"""Cut a model into stages, place them on ranks and order their computations together, for a plan whose ranks have unlike work.

The stages of a named schedule are as many on each rank, and the heaviest is as light as can be, so a head that outweighs the
others leaves ranks idle. Here a rank may have one heavy stage, and another rank several light ones. The result is None if such
a plan could not be faster by a share, if the setting offloads values or cuts words, or if the step is too long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from graphpp.cluster_planner.plans.prediction.predict_step import (
    Prediction,
    costs_and_bound,
    order_costs,
    predict,
    stage_costs,
    tables_of,
)
from graphpp.cluster_planner.plans.prediction.read_tables import ReadTable
from graphpp.cluster_planner.plans.prediction.single_layers import priced_setting, recut
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice
from graphpp.planner.segments import Cut
from graphpp.schedules.search.arguments import loop_of, v_of
from graphpp.schedules.search.free_placement import Found, Placed, PlacementSearch
from graphpp.schedules.search.scheduler import improved
from graphpp.schedules.search.tables import numbered, schedule_of
from graphpp.schedules.table.costs import Costs

MOST_PLACED = 768  # most forwards of a step whose stages are placed
_GAIN = 0.03  # least share of a step that balanced ranks without idle time would save
_PER_RANK = (1, 2, 3)  # stages a rank of the placements from which the search starts
_WORK = 12_000  # forwards of the quick orders of one plan's placements
_EFFORT = 0.25  # of the usual steps of the search of an order
_SLACK = 1.005  # of the found step, in which a quick order of the placement runs before a better order is searched
_TRIES = 3  # of an order whose bytes fit


def placed_stages(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    setting = found.setting
    plain = setting.shape.pp > 1 and setting.offload is None and not setting.word_parts
    plain = plain and len(request.machines.groups) == 1
    known = tables_of(request, setting) if plain and setting.microbatches * setting.shape.pp <= MOST_PLACED else None
    if known is None or len(known) > 1:
        return None
    if costs_and_bound(request, setting, found.cut)[1] > (1 - _GAIN) * found.seconds.total:
        return None
    joint = _Joint(request, found, cap, known[0])
    starts = list(joint.starts())
    best = joint.search.best(starts, _WORK)[0]
    limit = _SLACK * (found.seconds.total - found.seconds.optimizer)
    return joint.ordered(best) if best.placed != starts[0].placed and best.seconds < limit else None


class _Joint:
    """The plan of a prediction with other stages."""

    def __init__(self, request: PlanRequest, found: Prediction, cap: int, table: ReadTable) -> None:
        setting = found.setting
        segments = priced_setting(request.of(setting), setting, found.cut).segments
        self._request, self._found, self._cap, self._table = request, found, cap, table
        self._home = tuple(table.rank_of_stage[stage] for stage in range(setting.stages))
        _, (held, _) = order_costs(request, setting, found.cut, table)
        each = [0] * len(segments.starts)  # bytes of the state of each piece
        for one in segments.state:
            for piece in one.readers:
                each[piece] += one.weights + one.sums + one.optimizer // (one.shards or 1)
        self._state, self._rate = [0, *accumulate(each)], sum(held) / sum(each)
        self._ranks, self._microbatches = setting.shape.pp, setting.microbatches
        most = min(_PER_RANK[-1] * self._ranks, len(each), MOST_PLACED // self._microbatches)
        self.search = PlacementSearch(segments.costs, self._ranks, self._microbatches, cache(self._costs), self._room, most)

    def starts(self) -> Iterator[Found]:
        yield self.search.start(Placed(self._found.cut, self._home), self._table.schedule)
        for stages in (count * self._ranks for count in _PER_RANK if count * self._ranks <= self.search.most):
            for home in dict.fromkeys((v_of(stages, self._ranks), loop_of(stages, self._ranks))):
                yield self.search.start(self.search.balanced(home))

    def ordered(self, best: Found) -> Prediction | None:
        """The prediction under an order that begins with the found one and fits; None if there is none."""
        if best.order is None:
            return None
        cut = best.placed.cut
        table = schedule_of(best.order.problem, numbered(best.order, join=True), ORDER)
        room = [float(self._cap)] * self._ranks
        for _ in range(_TRIES):  # the bytes beside the activations depend on the order
            setting = self._setting(cut, ScheduleChoice.of(table))
            known = tables_of(self._request, setting)
            if known is None:
                return None
            costs, (held, _) = order_costs(self._request, setting, cut, known[0])
            room = [min(before, float(max(0, self._cap - nbytes))) for before, nbytes in zip(room, held, strict=True)]
            better = improved(best.order, costs, room, _EFFORT, ORDER)
            if better is None:
                return None
            table = better
            found = predict(self._request, self._setting(cut, ScheduleChoice.of(table)), cut)
            if found is not None and found.peak <= self._cap:
                return found
        return None

    def _setting(self, cut: Cut, choice: ScheduleChoice) -> PlanSetting:
        setting, counts = self._found.setting, self._found.setting.recomputed
        counts = counts and recut(self._request.of(setting).costs, counts, self._found.cut, cut)
        return replace(setting, schedule=choice, recomputed=counts)

    def _costs(self, placed: Placed) -> Costs:
        choice = ScheduleChoice("1F1B", -(-len(placed.cut) // self._ranks), stages=len(placed.cut))
        return stage_costs(self._request, self._setting(placed.cut, choice), placed.cut, placed.home)

    def _room(self, placed: Placed) -> Sequence[float]:
        """The bytes that a rank's state leaves, about."""
        room = [float(self._cap)] * self._ranks
        for rank, first, end in zip(placed.home, placed.cut, (*placed.cut[1:], len(self._state) - 1), strict=True):
            room[rank] -= self._rate * (self._state[end] - self._state[first])
        return room
