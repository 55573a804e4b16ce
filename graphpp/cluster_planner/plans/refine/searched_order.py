"""Searched orders: the order of F, B, I and W that ends soonest under a plan's own costs and memory.

Contract
    in   the prediction of a named schedule; the bytes that a rank may hold
    out  the prediction of the same setting under an order of `graphpp.schedule_auto`, whose placement is that of the named one;
         None where the step is too long to be searched as a whole, where it offloads values, and where no order fits

An order for more than some hundred forwards would take minutes to search.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.cluster_planner.plans.predict import Prediction, tables_of
from graphpp.cluster_planner.plans.question import Question
from graphpp.cluster_planner.plans.refine.order_within import order_within
from graphpp.cluster_planner.plans.settings import ORDER, ScheduleChoice
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.table.costs import Costs

MOST = 512  # forwards of a step whose order is searched
_EFFORT = 0.25  # of the usual number of steps: about a second


def searched_order(question: Question, found: Prediction, cap: int) -> Prediction | None:
    """The prediction of the setting under a searched order."""
    setting = found.setting
    if setting.offload is not None:  # which bytes are away depends on the order
        return None
    tables = tables_of(question, setting)
    if setting.shape.pp == 1 or setting.stages * setting.microbatches > MOST or tables is None or len(tables) > 1:
        return None
    home = dict(tables[0].rank_of_stage)

    def search(costs: Costs, room: Sequence[int]) -> ScheduleChoice:
        """The order that ends soonest within the bytes of each rank."""
        order = schedule_auto(
            costs, room, ranks=setting.shape.pp, microbatches=setting.microbatches, placement=home, effort=_EFFORT, name=ORDER
        )
        return ScheduleChoice(ORDER, setting.schedule.stages_per_rank, order=str(order))

    return order_within(question, found, cap, tables[0], search)
