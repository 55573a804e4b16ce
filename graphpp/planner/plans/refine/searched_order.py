"""Searched orders: the order of F, B, I and W that ends soonest under a plan's own costs and memory.

Contract
    in   the prediction of a named schedule; the bytes that a rank may hold
    out  the same setting under an order of `graphpp.schedule_auto`, whose placement is that of the named one; None where the
         step is too long to be searched as a whole, and where no order fits

The search has the bytes that the state leaves on each rank, its parts at their most; what an order really takes is predicted
like any other table. An order for more than some hundred forwards would take minutes to search.
"""

from __future__ import annotations

from dataclasses import replace

from graphpp.errors import ScheduleError
from graphpp.planner.plans.predict import Prediction, order_costs, tables_of
from graphpp.planner.plans.question import Question
from graphpp.planner.plans.settings import ORDER, ScheduleChoice, Setting
from graphpp.schedules.search.scheduler import schedule_auto

MOST = 512  # forwards of a step whose order is searched
_EFFORT = 0.25  # of the usual number of steps: about a second


def searched_order(question: Question, found: Prediction, cap: int) -> Setting | None:
    """The setting of a prediction under a searched order."""
    setting = found.setting
    tables = tables_of(question, setting)
    if setting.shape.pp == 1 or setting.stages * setting.microbatches > MOST or tables is None or len(tables) > 1:
        return None
    costs, held = order_costs(question, setting, found.cut, tables[0])
    room = [cap - nbytes for nbytes in held]
    if min(room) <= 0:
        return None
    try:
        table = schedule_auto(
            costs, room, ranks=setting.shape.pp, microbatches=setting.microbatches,
            placement=dict(tables[0].rank_of_stage), effort=_EFFORT, name=ORDER,
        )  # fmt: skip
    except ScheduleError:  # not even one microbatch after the other fits beside the state at its most
        return None
    return replace(setting, schedule=ScheduleChoice(ORDER, setting.schedule.stages_per_rank, order=str(table)))
