"""Predict a setting under another order, which is made for the bytes that its ranks have.

Contract
    in   the prediction of a named schedule and its table; the bytes that a rank may hold; what makes an order
    out  the prediction of the same setting under that order; None where no order fits, or the maker has none

The maker knows the bytes of activations alone. It may take the bytes that everything else leaves on each rank under the named
schedule. If the prediction of its order exceeds the cap, everything else counts with each kind at its most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphpp.cluster_planner.plans.predict import Prediction, order_costs, predict
from graphpp.cluster_planner.plans.question import Question
from graphpp.cluster_planner.plans.read_tables import ReadTable
from graphpp.cluster_planner.plans.settings import ScheduleChoice
from graphpp.errors import ScheduleError
from graphpp.schedules.table.costs import Costs

Make = Callable[[Costs, Sequence[int]], ScheduleChoice | None]
"""Makes an order for costs and the bytes of each rank. None: none is better; `ScheduleError`: none fits."""


def order_within(question: Question, found: Prediction, cap: int, table: ReadTable, make: Make) -> Prediction | None:
    """The prediction of the setting under the order that `make` returns."""
    known = order_costs(question, found.setting, found.cut, table)
    for beside in dict.fromkeys((known.least, known.most)):
        room = [cap - nbytes for nbytes in beside]
        choice = _made(make, known.costs, room) if min(room) > 0 else None
        ordered = None if choice is None else predict(question, replace(found.setting, schedule=choice), found.cut)
        if ordered is not None and ordered.peak <= cap:
            return ordered
    return None


def _made(make: Make, costs: Costs, room: Sequence[int]) -> ScheduleChoice | None:
    try:
        return make(costs, room)
    except ScheduleError:  # not even one microbatch after the other fits
        return None
