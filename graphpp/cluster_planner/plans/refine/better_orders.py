"""Orders of F, B, I and W that end sooner than a named schedule, under a plan's own costs and memory.

Contract
    in   the prediction of a named schedule; the bytes that a rank may hold
    out  the prediction of the same setting under another order: `searched_order` takes one of `graphpp.schedule_auto` with the
         placement of the named one, `placed_weight_grads` moves the weight gradients alone into the waits of the ranks. None
         where no order fits or ends sooner, where the setting offloads values, and where the step is too long to be
         simulated as a whole

An order is made for the bytes that everything but activations leaves on each rank under the named schedule. If the prediction
of the order exceeds the cap, everything else counts with each kind at its most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphpp.cluster_planner.plans.predict_step import Prediction, order_costs, predict, tables_of
from graphpp.cluster_planner.plans.read_tables import ReadTable
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, ScheduleChoice, table_of
from graphpp.errors import ScheduleError
from graphpp.schedules.search.place_weight_grads import place_weight_grads
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.table.costs import Costs

MOST_SEARCHED = 512  # forwards of a step whose order is searched: more would take minutes
MOST_PLACED = 4096  # forwards of a step whose weight gradients are placed
_EFFORT = 0.25  # of the usual number of steps: about a second

Make = Callable[[Costs, Sequence[int]], ScheduleChoice | None]
"""Makes an order for costs and the bytes of each rank. None: none is better; `ScheduleError`: none fits."""


def searched_order(request: PlanRequest, found: Prediction, cap: int) -> Prediction | None:
    """The prediction of the setting under a searched order."""
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
    """The prediction of the setting with its weight gradients placed; forwards and backwards stay in their order."""
    setting = found.setting
    tables = _tables(request, setting, MOST_PLACED)
    named = table_of(setting.schedule, setting.shape.pp, setting.microbatches)
    if tables is None or named is None or setting.schedule.order is not None:
        return None

    def place(costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
        placed = place_weight_grads(named, costs, room, name=f"{setting.schedule}, weight gradients placed")
        return None if placed is named else replace(setting.schedule, order=str(placed))

    return _order_within(request, found, cap, tables[-1], place)


def _tables(request: PlanRequest, setting: PlanSetting, most: int) -> list[ReadTable] | None:
    """The tables of a setting that may get another order; None for any other setting."""
    long = setting.stages * setting.microbatches > most
    offloads = setting.offload is not None  # which bytes are away depends on the order
    return None if offloads or long or setting.shape.pp == 1 else tables_of(request, setting)


def _order_within(request: PlanRequest, found: Prediction, cap: int, table: ReadTable, make: Make) -> Prediction | None:
    costs, held = order_costs(request, found.setting, found.cut, table)
    for beside in dict.fromkeys(held):
        room = [cap - nbytes for nbytes in beside]
        choice = _made(make, costs, room) if min(room) > 0 else None
        ordered = None if choice is None else predict(request, replace(found.setting, schedule=choice), found.cut)
        if ordered is not None and ordered.peak <= cap:
            return ordered
    return None


def _made(make: Make, costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
    try:
        return make(costs, room)
    except ScheduleError:  # not even one microbatch after the other fits
        return None
