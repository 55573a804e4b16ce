"""UNSHARD, RESHARD and REDUCE_GRAD: the checker accepts them, no more stages are whole than asked for, gathers are fewest."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

import graphpp
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule

TABLES = [
    *((name, 4, 4, 8) for name in ("GPipe", "1F1B", "ZB-H1")),
    *((name, 2, 4, 6) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")),
    *((name, 2, 8, 8) for name in ("Interleaved1F1B", "LoopedBFS")),
]


def gathers(table: Schedule) -> Counter[int]:
    return Counter(action.stage for _, _, action in table.cells() if action.kind is Kind.UNSHARD)


def whole_at_once(table: Schedule) -> int:
    most = 0
    for row in table.table:
        now = set[int]()
        for action in row:
            if action is not None and action.kind is Kind.UNSHARD:
                now.add(action.stage)
            elif action is not None and action.kind is Kind.RESHARD:
                now.remove(action.stage)
            most = max(most, len(now))
    return most


@pytest.mark.parametrize(("name", "ranks", "stages", "microbatches"), TABLES)
@pytest.mark.parametrize("keep", [None, 1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_tables_are_accepted_and_keep_no_more_stages(
    name: str, ranks: int, stages: int, microbatches: int, keep: int | None, training: bool
) -> None:
    plain = make_table(name, ranks, stages, microbatches)
    table = add_send_recv(plain if training else plain.forward_only())
    if name == "DualPipeV" and keep == 1 and training:
        with pytest.raises(graphpp.ScheduleError, match="computes with 2 stages at once"):
            place_shards(table, keep)
        return
    placed = place_shards(table, keep)
    check(placed, ranks=ranks, stages=stages, microbatches=microbatches, training=training)
    assert whole_at_once(placed) <= (keep or stages // ranks)
    rest = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
    for before, after in zip(table.table, placed.table, strict=True):
        assert [each for each in before if each] == [each for each in after if each is not None and each.kind not in rest]
    if keep is None or keep >= stages // ranks:
        assert set(gathers(placed).values()) == {1}
    reduced = Counter(action.stage for _, _, action in placed.cells() if action.kind is Kind.REDUCE_GRAD)
    assert reduced == (dict.fromkeys(range(stages), 1) if training else {})


def fewest(uses: list[int], keep: int) -> int:
    """The gathers of the best of all choices, found by trying each."""
    states = {frozenset[int](): 0}
    for stage in uses:
        following: dict[frozenset[int], int] = {}
        for held, count in states.items():
            if stage in held:
                options = [(held, count)]
            else:
                kept = [each for size in range(keep) for each in combinations(held, min(size, len(held)))]
                options = [(frozenset((*each, stage)), count + 1) for each in kept]
            for state, cost in options:
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize(("name", "microbatches"), [("Interleaved1F1B", 8), ("LoopedBFS", 8), ("InterleavedZeroBubble", 6)])
def test_no_choice_has_fewer_gathers(name: str, microbatches: int, keep: int) -> None:
    table = make_table(name, 2, 8, microbatches)
    placed = place_shards(add_send_recv(table), keep)
    for row, before in zip(placed.table, table.table, strict=True):
        uses = [action.stage for action in before if action is not None]
        found = sum(action is not None and action.kind is Kind.UNSHARD for action in row)
        assert found == fewest(uses, keep)


def test_actions_that_a_table_has_stay() -> None:
    rows = ["0UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 0F1 1F1 1B0 1B1 0B0 0B1 0REDUCE_GRAD 0RESHARD"]
    with pytest.raises(graphpp.ScheduleError, match=r"keep=2: the schedule 'custom' says itself .*0UNSHARD"):
        place_shards(Schedule.of(rows), 2)
    placed = place_shards(Schedule.of(rows), None)
    text = " ".join(str(action) for action in placed.table[0])
    expected = "1UNSHARD 0UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 0F1 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD"
    assert text == expected
    check(placed, ranks=1, stages=2, microbatches=2, training=True)
