"""Searched orders: the order of F, B, I and W that ends soonest under a plan's own costs and memory.

Contract
    in   the prediction of a named schedule; the bytes that a rank may hold
    out  the prediction of the same setting under an order of `graphpp.schedule_auto`, whose placement is that of the named one;
         None where the step is too long to be searched as a whole, where it offloads values, and where no order fits

The search knows the bytes of activations alone. It may take the bytes that everything else leaves on each rank under the named
schedule. If the prediction of its order exceeds the cap, everything else counts with each kind at its most. An order for more
than some hundred forwards would take minutes to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpp.errors import ScheduleError
from graphpp.planner.plans.predict import Prediction, order_costs, predict, tables_of
from graphpp.planner.plans.question import Question
from graphpp.planner.plans.read_tables import ReadTable
from graphpp.planner.plans.settings import ORDER, ScheduleChoice, Setting
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
    known = order_costs(question, setting, found.cut, tables[0])
    for beside in dict.fromkeys((known.least, known.most)):
        order = _order(setting, known.costs, tables[0], [cap - nbytes for nbytes in beside])
        prediction = predict(question, order, found.cut) if order is not None else None
        if prediction is not None and prediction.peak <= cap:
            return prediction
    return None


def _order(setting: Setting, costs: Costs, table: ReadTable, room: Sequence[int]) -> Setting | None:
    """The setting under the order that ends soonest within the bytes of each rank."""
    if min(room) <= 0:
        return None
    try:
        found = schedule_auto(
            costs, list(room), ranks=setting.shape.pp, microbatches=setting.microbatches,
            placement=dict(table.rank_of_stage), effort=_EFFORT, name=ORDER,
        )  # fmt: skip
    except ScheduleError:  # not even one microbatch after the other fits
        return None
    return replace(setting, schedule=ScheduleChoice(ORDER, setting.schedule.stages_per_rank, order=str(found)))
