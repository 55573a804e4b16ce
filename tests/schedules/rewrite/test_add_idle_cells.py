"""Idle cells are added exactly where a rank waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.table.actions import upstream
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import named, rows_of


def test_pictures_in_the_documentation_are_true() -> None:
    rows = Schedule.of(["0F0 0B0", "1F0 1B0"]).table
    assert add_idle_cells(rows, 2) == Schedule.parse("r0 0F0 . . 0B0\nr1 . 1F0 1B0").table


def test_waits_filled_with_weight_gradients() -> None:
    rows = Schedule.of(["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"]).table
    assert (
        add_idle_cells(rows, 2, fill=True)
        == Schedule.parse("r0 0F0 0F1 . 0I0 0W0 . 0I1 0W1\nr1 . 1F0 1I0 1F1 1W0 1I1 1W1").table
    )


@given(named())
@settings(deadline=None, max_examples=examples(60))
def test_every_action_is_as_early_as_its_inputs_allow(schedule: Schedule) -> None:
    table = Schedule(add_idle_cells(rows_of(schedule), schedule.stages), schedule.stages, schedule.microbatches)
    column_of = {leaf: column for _, column, action in table.cells() for leaf in action.leaves}
    for rank, column, action in table.cells():
        made = [
            column_of[maker] for leaf in action.leaves for maker in upstream(leaf, table.stages) if maker in column_of
        ]
        before = [at for at in range(column) if table.table[rank][at]]
        assert column == 1 + max([-1, *made, *before[-1:]])


def test_a_cycle_of_waits_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no rank can go on: they stop at 0B0, 1F1"):
        add_idle_cells(Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]).table, 2)
