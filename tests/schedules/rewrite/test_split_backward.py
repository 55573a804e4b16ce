"""Delayed weight gradients: only Ws move, into idle cells of the cool-down or to its end."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.split_backward import (
    defer_weight_grads,
    merge_backward,
    split_backward,
    without_overlaps,
)
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Row, Schedule
from tests.exhaustive import examples
from tests.schedules.replay import replayed
from tests.schedules.tables import Rows, named, tables


def accept(schedule: Schedule) -> None:
    check(schedule, ranks=schedule.ranks, stages=schedule.stages, microbatches=schedule.microbatches)


def flow(row: Row) -> list[Action]:
    """The actions for which other ranks may wait, an I counted as a B."""
    leaves = [leaf for action in row if action for leaf in action.leaves if leaf.kind is not Kind.W]
    return [leaf._replace(kind=Kind.B) if leaf.kind is Kind.I else leaf for leaf in leaves]


def test_pictures_in_the_documentation_are_true() -> None:
    before = Schedule.of(["0F0 0F1 0B0 . 0B1", "1F0 1B0 1F1 1B1"])
    assert defer_weight_grads(before, [0]) == Schedule.of(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1B0 1F1 1B1"])
    assert split_backward(Schedule.of(["0F0 . 0B0"])) == Schedule.of(["0F0 . 0I0 0W0"])


def test_idle_cells_of_the_cool_down_are_filled_in_order() -> None:
    deferred = defer_weight_grads(make_table("1F1B", 3, 3, 4), [0])
    assert deferred == Schedule.parse(
        "r0 0F0 0F1 . . 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3\n"
        "r1 .   1F0 . 1F1 1B0 1F2 1B1 1F3 1B2 . 1B3\n"
        "r2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_without_stages_nothing_moves() -> None:
    assert defer_weight_grads(make_table("1F1B", 2, 2, 3), []) == make_table("1F1B", 2, 2, 3)


def test_overlaps_are_split_too() -> None:
    deferred = defer_weight_grads(make_table("Combined1F1B", 1, 2, 2), [1])
    assert deferred == Schedule.of(["0F0 1F0 (0F1;1I0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1I1 0B1 1W0 1W1"])
    woven = Schedule.of(["0F0 0I0 (0F1;0W0)OVERLAP_F_B 0I1 . 0W1"])
    assert defer_weight_grads(woven, [0]) == Schedule.of(["0F0 0I0 0F1 0I1 0W0 0W1"])


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [*product(["1F1B", "Interleaved1F1B"], [2, 4], [4, 8])])
def test_what_other_ranks_wait_for_comes_earlier(name: str, ranks: int, microbatches: int) -> None:
    """At unit costs the first rank's Ws in its bubble shorten the step, and their memory stays alive until then."""
    schedule = make_table(name, ranks, ranks * (1 if name == "1F1B" else 2), microbatches)
    everything = defer_weight_grads(schedule, range(schedule.stages))
    assert replayed(everything)[0] < replayed(schedule)[0]
    assert replayed(everything)[1] >= replayed(schedule)[1]


@given(named(), st.data())
@settings(deadline=None, max_examples=examples(100))
def test_nothing_but_weight_gradients_moves(schedule: Schedule, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, schedule.stages - 1)))
    for deferred in (defer_weight_grads(schedule, chosen), split_backward(schedule)):
        accept(deferred)
        accept(add_send_recv(deferred))
        assert [*map(flow, deferred.table)] == [*map(flow, schedule.table)]
    split = split_backward(schedule)
    assert not [leaf for _, _, action in split.cells() for leaf in action.leaves if leaf.kind is Kind.B]
    deferred = defer_weight_grads(schedule, chosen)
    for row in deferred.table:
        for stage in chosen:
            columns = [at for at, cell in enumerate(row) if cell and (cell.stage, cell.kind) == (stage, Kind.W)]
            forwards = [at for at, cell in enumerate(row) if cell and any(leaf.kind is Kind.F for leaf in cell.leaves)]
            assert not columns or min(columns) > max(forwards)


@given(tables(sharding=False))
@settings(deadline=None, max_examples=examples(60))
def test_any_legal_table_stays_legal(table: tuple[Rows, int, int, Any]) -> None:
    """Sends and receives, if there are any, stay in place."""
    rows, stages, microbatches, _ = table
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    for made in (defer_weight_grads(schedule, range(0, stages, 2)), split_backward(schedule)):
        accept(made)


@pytest.mark.parametrize(
    ("table", "stages", "fault"),
    [
        ("0F0 0B0", [1], r"custom has no stage 1; its stages are 0..0"),
        ("0F0 0B0", [-1], "has no stage -1"),
        ("0UNSHARD 0F0 0B0 0RESHARD", [0], "rank 0, column 3: 0RESHARD would run before the weight gradients"),
        ("0F0 0B0 0REDUCE_GRAD", [0], "rank 0, column 2: 0REDUCE_GRAD would run before the weight gradients"),
    ],
)
def test_what_cannot_be_held_back(table: str, stages: list[int], fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        defer_weight_grads(Schedule.of([table]), stages)


def kinds(schedule: Schedule) -> set[Kind]:
    return {leaf.kind for _, _, action in schedule.cells() for leaf in action.leaves}


@given(tables())
def test_any_legal_table(table: tuple) -> None:  # type: ignore[type-arg]
    rows, stages, microbatches, _ = table
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    for made in (split_backward(without_overlaps(schedule)), merge_backward(schedule)):
        check(add_send_recv(made), ranks=schedule.ranks, stages=stages, microbatches=microbatches)
    assert Kind.B not in kinds(split_backward(without_overlaps(schedule)))
    assert kinds(merge_backward(schedule)) - {Kind.R} == {Kind.F, Kind.B}


def test_overlaps_and_messages_are_taken_apart() -> None:
    table = Schedule.of(["0UNSHARD 0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1 0REDUCE_GRAD"])
    assert str(split_backward(without_overlaps(table))).split()[6:] == "0F0 0F1 0I0 0W0 0I1 0W1".split()  # noqa: SIM905
    assert str(merge_backward(table)).split()[6:] == "0F0 0F1 0B0 0B1".split()  # noqa: SIM905
