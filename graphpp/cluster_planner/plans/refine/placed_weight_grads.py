"""Placed weight gradients: a named schedule whose weight gradients stand in the waits of its ranks, by a plan's own costs.

Contract
    in   the prediction of a named schedule; the bytes that a rank may hold
    out  the prediction of the same setting under `place_weight_grads`; None where no placement ends sooner within the bytes,
         where the setting offloads values, and where a step is too long to be simulated as a whole

Every rank runs its forwards and backwards in the order of the named schedule, so a step may be longer than one whose order is
searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpp.cluster_planner.plans.predict import Prediction, tables_of
from graphpp.cluster_planner.plans.question import Question
from graphpp.cluster_planner.plans.refine.order_within import order_within
from graphpp.cluster_planner.plans.settings import ScheduleChoice, table_of
from graphpp.schedules.search.place_weight_grads import place_weight_grads
from graphpp.schedules.table.costs import Costs

MOST = 4096  # forwards of a step whose weight gradients are placed


def placed_weight_grads(question: Question, found: Prediction, cap: int) -> Prediction | None:
    """The prediction of the setting with its weight gradients placed."""
    setting = found.setting
    if setting.offload is not None or setting.shape.pp == 1 or setting.stages * setting.microbatches > MOST:
        return None
    tables = tables_of(question, setting)
    named = table_of(setting.schedule, setting.shape.pp, setting.microbatches)
    if tables is None or named is None or setting.schedule.order is not None:
        return None

    def place(costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
        placed = place_weight_grads(named, costs, room, name=f"{setting.schedule}, weight gradients placed")
        return None if placed is named else replace(setting.schedule, order=str(placed))

    return order_within(question, found, cap, tables[-1], place)
