"""Megatron-Core's functions, with the results of megatron-core 0.16, and its interleaved schedule."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.megatron_interleaved import (
    from_orders,
    is_recomputed,
    least_group,
    megatron_interleaved,
    rank_microbatches,
    recompute_partially,
    schedule_table,
    table_to_order,
)
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def test_schedule_table() -> None:
    table = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    assert schedule_table(5, 2, 3) == table
    assert schedule_table(2, 3, 4) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    with pytest.raises(ScheduleError, match="group: take a positive integer"):
        schedule_table(2, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "per_rank"),
    [
        ((8, 1, None, 4), [(8, False, 3, 5), (8, False, 2, 6), (8, False, 1, 7), (8, False, 0, 8)]),
        ((8, 2, 4, 4), [(16, False, 10, 6), (16, False, 8, 8), (16, False, 6, 10), (16, False, 4, 12)]),
        ((4, 1, 1, 2), [(4, False, 1, 3), (4, False, 0, 4)]),
        ((5, 2, 3, 2), [(10, False, 5, 5), (10, False, 3, 7)]),
        ((4, 2, 4, 4), [(8, True, 8, 0), (8, True, 8, 0), (8, False, 6, 2), (8, False, 4, 4)]),
        ((3, 2, 3, 1), [(6, False, 0, 6)]),
    ],
)
def test_rank_microbatches(
    arguments: tuple[int, int, int | None, int], per_rank: list[tuple[int, bool, int, int]]
) -> None:
    assert [rank_microbatches(*arguments, rank) for rank in range(arguments[3])] == per_rank


def test_table_to_order() -> None:
    assert table_to_order(5, 2, schedule_table(5, 2, 3)) == numbers("1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1")
    assert table_to_order(0, 1, schedule_table(2, 1, 1)) == [1, -1, 1, -1]
    assert table_to_order(4, 2, schedule_table(2, 2, 2)) == [1, 1, 2, 2, -2, -2, -1, -1]


def test_a_schedule_says_what_is_recomputed() -> None:
    assert recompute_partially(make_table("1F1B", 2, 2, 4), 1).recomputed == {(0, 1), (0, 3)}
    assert recompute_partially(make_table("1F1B", 2, 2, 4), 0).recomputed == {(s, m) for s in range(2) for m in range(4)}
    assert recompute_partially(make_table("1F1B", 2, 2, 4), 2).recomputed == frozenset()
    assert recompute_partially(make_table("Combined1F1B", 1, 1, 4), 1).recomputed == {(0, 1), (0, 3)}
    assert recompute_partially(Schedule.of(["0F0 0F1 0F2"]), 2).recomputed == {(0, 2)}


@pytest.mark.parametrize(("ranks", "chunks", "microbatches", "n"), [*product([1, 2, 4], [1, 2], [3, 8], [0, 1, 3, 9])])
def test_what_is_recomputed_goes_by_the_warm_up(ranks: int, chunks: int, microbatches: int, n: int) -> None:
    group = least_group("any", ranks, microbatches, None)
    schedule = recompute_partially(megatron_interleaved(ranks, ranks * chunks, microbatches, group=group), n)
    for rank, row in enumerate(schedule.table):
        forwards = [(action.stage, action.microbatch) for action in row if action and action.kind is Kind.F]
        warm_up = rank_microbatches(microbatches, chunks, group, ranks, rank)[2] if ranks > 1 else chunks - 1
        window = [pair for at, pair in enumerate(forwards) if is_recomputed(at, warm_up, n)]
        assert {pair for pair in schedule.recomputed or () if pair in forwards} == set(window)


@pytest.mark.parametrize(("ranks", "chunks"), [*product([1, 2, 3, 4], [1, 2, 3])])
def test_every_group_that_fits_makes_a_table_that_runs(ranks: int, chunks: int) -> None:
    for microbatches in (1, 2, 3, 5, 8):
        least = min(ranks, microbatches)
        for group in (None, *range(1, 10)):
            fits = group is None or (least <= group <= microbatches and not 0 < microbatches % group < least)
            make = partial(megatron_interleaved, ranks, ranks * chunks, microbatches, group=group)
            if not fits:
                with pytest.raises(ScheduleError, match=rf"does not admit groups of {group} of {microbatches}.*fit"):
                    make()
                continue
            schedule = make()
            counts = {"ranks": ranks, "stages": ranks * chunks, "microbatches": microbatches}
            check(schedule, **counts)
            check(add_send_recv(schedule), **counts)


def test_an_order_reads_as_a_schedule() -> None:
    orders = [[1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, -2, -2.5, 2, -2, -2.5, -1, -1]]
    read = from_orders(orders)
    assert read == Schedule.parse(
        "r0 0F0 0F1 2F0 2F1 .   2B0 .   .   2B1 .   0B0 0B1\nr1 .   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1B0 1B1"
    )
    check(read, ranks=2, stages=4, microbatches=2)
    assert from_orders([]) == Schedule((), 0, 0)


@pytest.mark.parametrize(
    ("orders", "fault"),
    [
        ([[1, 0, -1]], "rank 0: 0 is no step"),
        ([[1.5, -1]], "rank 0: 1.5 is no step"),
        ([[1], [1, -1.25]], "rank 1: -1.25 is no step"),
        ([[1, -1, 1, -1], [1, 1, -1, -1]], r"deadlock(?s:.)*0B0 \(rank 0, column 1\) waits for 1B0"),
    ],
)
def test_what_is_no_order(orders: list[list[float]], fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        from_orders(orders)


@pytest.mark.parametrize("orders", [[[-1, 1]], [[1]], [[1, 1, -1]], [[1, -1], [1]]])
def test_an_order_that_cannot_run_or_does_not_end_is_refused(orders: list[list[float]]) -> None:
    with pytest.raises(ScheduleError):
        from_orders(orders)
