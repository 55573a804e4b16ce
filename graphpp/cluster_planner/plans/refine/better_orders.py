"""Search orders of F, B, I, W and R that finish earlier than a plan's own one, under its costs and memory.

The result is None if no order fits or is faster, if the setting offloads values, or if the step is too long to simulate in
full. The memory available to activations is the cap minus each rank's other bytes under the named schedule. If the predicted
order exceeds the cap, the search repeats with the maxima of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, order_costs, predict, tables_of
from graphpp.cluster_planner.plans.prediction.read_tables import ReadTable
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice, table_of
from graphpp.errors import ScheduleError
from graphpp.schedules.search.place_weight_grads import place_weight_grads
from graphpp.schedules.search.recompute_ahead import recompute_ahead
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.table.costs import Costs

MOST_SEARCHED = 512  # most forwards of a step whose order is searched or which recomputes ahead; more would take minutes
MOST_PLACED = 4096  # most forwards of a step whose weight gradients are placed
_EFFORT = 0.25  # of the usual number of steps: about a second

Make = Callable[[Costs, Sequence[int]], ScheduleChoice | None]
"""Makes an order for costs and each rank's bytes. None: no better order; `ScheduleError`: none fits."""


def searched_order(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    setting = found.setting
    tables = _tables(request, setting, MOST_SEARCHED)
    if tables is None or len(tables) > 1:
        return None
    home = dict(tables[0].rank_of_stage)

    def search(costs: Costs, room: Sequence[int]) -> ScheduleChoice:
        order = schedule_auto(
            costs, room, ranks=setting.shape.pp, microbatches=setting.microbatches, placement=home, effort=_EFFORT, name=ORDER
        )
        return ScheduleChoice(ORDER, setting.schedule.stages_per_rank, order=str(order))

    return _order_within(request, found, cap, tables[0], search)


def placed_weight_grads(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    """Move only weight gradients, into idle time."""
    setting = found.setting
    tables = _tables(request, setting, MOST_PLACED)
    named = table_of(setting.schedule, setting.shape.pp, setting.microbatches)
    if tables is None or named is None or setting.schedule.order is not None:
        return None

    def place(costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
        placed = place_weight_grads(named, costs, room, name=f"{setting.schedule}, weight gradients placed")
        return None if placed is named else replace(setting.schedule, order=str(placed))

    return _order_within(request, found, cap, tables[-1], place)


def recomputed_ahead(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    """Move only recomputation, into idle time."""
    setting = found.setting
    layers = setting.keep == 0  # an R would gather the layers once more
    tables = None if layers or setting.recompute is None else _tables(request, setting, MOST_SEARCHED)
    table = table_of(setting.schedule, setting.shape.pp, setting.microbatches)
    if tables is None or table is None or table.recomputed_ahead:
        return None

    def place(costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
        placed = recompute_ahead(replace(table, name=f"{setting.schedule}, recomputed ahead"), costs, room)
        return replace(setting.schedule, order=str(placed)) if placed.recomputed_ahead else None

    return _order_within(request, found, cap, tables[-1], place, ahead=True)


def _tables(request: PlanRequest, setting: PlanSetting, most: int) -> list[ReadTable] | None:
    """The tables of a setting that may get another order; None for any other setting."""
    long = setting.stages * setting.microbatches > most
    offloads = setting.offload is not None  # which bytes are offloaded depends on the order
    return None if offloads or long or setting.shape.pp == 1 else tables_of(request, setting)


def _order_within(
    request: PlanRequest, found: Prediction, cap: int, table: ReadTable, make: Make, *, ahead: bool = False
) -> Prediction | None:
    costs, held = order_costs(request, found.setting, found.cut, table, ahead)
    for beside in dict.fromkeys(held):
        room = [most - nbytes for most, nbytes in zip(request.caps(found.setting.shape, cap), beside, strict=True)]
        choice = _made(make, costs, room) if min(room) > 0 else None
        ordered = None if choice is None else predict(request, replace(found.setting, schedule=choice), found.cut)
        if ordered is not None and ordered.over(cap) <= 0:
            return ordered
    return None


def _made(make: Make, costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
    try:
        return make(costs, room)
    except ScheduleError:  # not even one microbatch at a time fits
        return None
