"""Combined 1F1B: overlapped parts are independent, and without overlaps the table is the schedule that it is made from."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.megatron_interleaved import (
    combined_1f1b,
    from_orders,
    rank_microbatches,
    schedule_table,
    table_to_order,
)
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Action, Kind, upstream
from graphpp.schedules.table.schedule import Schedule


def overlaps(schedule: Schedule) -> list[tuple[Action, ...]]:
    return [action.parts for _, _, action in schedule.cells() if action.parts]


def one_by_one(schedule: Schedule) -> list[list[Action]]:
    """The rows with the parts of an overlap one after the other."""
    return [[leaf for action in row if action for leaf in action.leaves] for row in schedule.table]


def test_several_stages_on_one_rank_pass_each_other() -> None:
    schedule = combined_1f1b(1, 3, 2)
    row = "0F0 1F0 2F0 (0F1;2B0)OVERLAP_F_B (1F1;1B0)OVERLAP_F_B (2F1;0B0)OVERLAP_F_B 2B1 1B1 0B1"
    assert schedule == Schedule.of([row])


@pytest.mark.parametrize(("ranks", "chunks"), [*product([1, 2, 3, 4], [1, 2, 3])])
def test_the_parts_of_an_overlap_are_independent(ranks: int, chunks: int) -> None:
    stages = ranks * chunks
    for microbatches in (1, 2, 3, 5, 8, 9):
        schedule = combined_1f1b(ranks, stages, microbatches)
        counts = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
        check(schedule, **counts)
        check(add_send_recv(schedule), **counts)
        for forward, backward in overlaps(schedule):
            assert (forward.kind, backward.kind) == (Kind.F, Kind.B)
            assert forward.microbatch != backward.microbatch
            assert forward not in upstream(backward, stages)
        # Forwards, then overlaps, then backwards: after the warm-up every forward is paired.
        for row in schedule.table:
            kinds = [action.kind for action in row if action]
            assert kinds == sorted(kinds, key=[Kind.F, Kind.OVERLAP_F_B, Kind.B].index)


@pytest.mark.parametrize(("ranks", "chunks", "group"), [(2, 2, 2), (2, 2, 3), (4, 2, 4), (3, 3, 5)])
def test_order_is_megatrons_with_one_more_forward_in_the_warm_up(ranks: int, chunks: int, group: int) -> None:
    microbatches = 2 * group
    steps = schedule_table(microbatches, chunks, group)
    counts = [rank_microbatches(microbatches, chunks, group, ranks, rank)[2] + 1 for rank in range(ranks)]
    theirs = from_orders([table_to_order(warm_up, chunks, steps) for warm_up in counts])
    assert one_by_one(combined_1f1b(ranks, ranks * chunks, microbatches, group=group)) == one_by_one(theirs)


def test_without_the_extra_forward_the_first_pair_would_depend_on_itself() -> None:
    """Without it, on the last rank, Megatron's usual order pairs F and B of the last stage and one microbatch."""
    last = [cell for cell in make_table("MegatronInterleaved", 2, 4, 4).table[1] if cell]
    pair = next(
        (one, two) for one, two in pairwise(last) if (one.kind, two.kind) == (Kind.F, Kind.B)
    )
    assert pair == (Action(3, Kind.F, 0), Action(3, Kind.B, 0))


def test_group_by_partial() -> None:
    source = partial(combined_1f1b, group=3)
    assert make_table(source, 2, 4, 6) == combined_1f1b(2, 4, 6, group=3) != combined_1f1b(2, 4, 6)
    with pytest.raises(ScheduleError, match="Combined1F1B on 2 ranks does not admit groups of 5 of 6 microbatches"):
        combined_1f1b(2, 4, 6, group=5)
