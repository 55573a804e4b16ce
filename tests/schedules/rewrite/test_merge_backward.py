"""A schedule with its backwards split, or merged, still runs, on the same ranks and in the same order."""

from __future__ import annotations

from hypothesis import given

from graphpp.schedules.check.checker import check
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.merge_backward import merge_backward, without_overlaps
from graphpp.schedules.rewrite.split_backward import split_backward
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.tables import named, tables


def kinds(schedule: Schedule) -> set[Kind]:
    return {leaf.kind for _, _, action in schedule.cells() for leaf in action.leaves}


@given(named())
def test_named_schedules_split_and_back(schedule: Schedule) -> None:
    split = split_backward(without_overlaps(schedule))
    assert kinds(split) & {Kind.B, Kind.OVERLAP_F_B} == set()
    whole = merge_backward(split)
    assert whole == merge_backward(schedule) and kinds(whole) <= {Kind.F, Kind.B}
    for made in (split, whole):
        check(add_send_recv(made), ranks=schedule.ranks, stages=schedule.stages, microbatches=schedule.microbatches)


@given(tables())
def test_any_legal_table(table: tuple) -> None:  # type: ignore[type-arg]
    rows, stages, microbatches, _ = table
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    for made in (split_backward(without_overlaps(schedule)), merge_backward(schedule)):
        check(add_send_recv(made), ranks=schedule.ranks, stages=stages, microbatches=microbatches)
    assert Kind.B not in kinds(split_backward(without_overlaps(schedule)))
    assert kinds(merge_backward(schedule)) == {Kind.F, Kind.B}


def test_overlaps_and_messages_are_taken_apart() -> None:
    table = Schedule.of(["0UNSHARD 0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1 0REDUCE_GRAD"])
    assert str(split_backward(without_overlaps(table))).split()[6:] == "0F0 0F1 0I0 0W0 0I1 0W1".split()  # noqa: SIM905
    assert str(merge_backward(table)).split()[6:] == "0F0 0F1 0B0 0B1".split()  # noqa: SIM905
