"""The rules on arrays give the verdict of the rules action by action, for right, spoilt and odd tables."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.check import checker
from graphpp.schedules.check.schedule_under_check import ScheduleUnderCheck
from graphpp.schedules.check.vectorized import is_valid
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.mutations import MUTATIONS
from tests.schedules.tables import Rows, tables


def faultless(schedule: Schedule, stages: int, microbatches: int, *, training: bool = True) -> bool:
    """The verdict of the rules applied action by action."""
    try:
        checker.find_fault(ScheduleUnderCheck(schedule, stages, microbatches, training))
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("name", MUTATIONS)
def test_both_ways_give_one_verdict_on_spoilt_tables(name: str) -> None:
    verdicts: Counter[bool] = Counter()

    @given(tables())
    @settings(deadline=None, max_examples=examples(60), database=None, derandomize=True)
    def run(table: tuple[Rows, int, int, Random]) -> None:
        rows, stages, microbatches, random = table
        for _ in range(random.choice([0, 1, 1, 2])):
            MUTATIONS[name](random, rows)
        schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
        for made in (schedule, schedule.forward_only()):
            for training in (True, False):
                verdict = faultless(made, stages, microbatches, training=training)
                assert is_valid(made, stages, microbatches, training=training) == verdict, str(made)
                verdicts[verdict] += 1

    run()
    assert verdicts[True] > 0 < verdicts[False]


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 5), (4, 7), (3, 6), (5, 6)])
def test_a_table_for_other_counts_is_not_valid(stages: int, microbatches: int) -> None:
    made = make_table("1F1B", 4, 4, 6)
    assert is_valid(made, 4, 6, training=True)
    assert not is_valid(made, stages, microbatches, training=True)


@pytest.mark.parametrize(
    "odd",
    [
        Action(0, Kind.UNSHARD, 0),
        Action(0, Kind.UNSHARD, -1),
        Action(0, Kind.F),
        Action(0, Kind.F, -1),
        Action(-1, Kind.F, 0),
        Action(0, Kind.F, 2**31),
        Action(2**70, Kind.F, 0),
        Action(0, Kind.F, 0, (Action(0, Kind.F, 1), Action(0, Kind.B, 0))),
        Action(0, Kind.F, 0.5),  # type: ignore[arg-type]
        Action("0", Kind.F, 0),  # type: ignore[arg-type]
        Action(-1, Kind.OVERLAP_F_B),
        Action(-1, Kind.P2P, None, (Action(0, Kind.F, 1), Action(0, Kind.B, 0))),
        Action(-1, Kind.OVERLAP_F_B, None, (Action(-1, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 1),)), Action(0, Kind.B, 0))),
    ],
)
def test_an_action_that_no_table_may_hold_is_not_valid(odd: Action) -> None:
    good = [Action(0, Kind.F, 0), Action(0, Kind.F, 1), Action(0, Kind.B, 0), Action(0, Kind.B, 1)]
    for row in ([odd, *good], [*good, odd]):
        assert not is_valid(Schedule((tuple(row),), 1, 2), 1, 2, training=True)
    assert is_valid(Schedule((tuple(good),), 1, 2), 1, 2, training=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(0, 0, 0), (1, 0, 0), (2, 0, 4), (2, 2, 0), (1, 1, 1)])
def test_both_ways_give_one_verdict_on_empty_tables(ranks: int, stages: int, microbatches: int, training: bool) -> None:
    empty = Schedule(((),) * ranks, stages, microbatches)
    verdict = faultless(empty, stages, microbatches, training=training)
    assert is_valid(empty, stages, microbatches, training=training) == verdict


def test_a_pair_of_recomputation_out_of_range_is_not_valid() -> None:
    plain = make_table("1F1B", 2, 2, 4)
    for pair, verdict in (((1, 3), True), ((2, 0), False), ((0, 4), False)):
        made = Schedule(plain.table, 2, 4, recomputed=frozenset({pair}))
        assert is_valid(made, 2, 4, training=True) == faultless(made, 2, 4) == verdict


def test_a_right_table_is_not_checked_action_by_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow way is for the text of a refusal alone."""

    def refused(_: ScheduleUnderCheck) -> None:
        raise AssertionError("find_fault ran on a right table")

    monkeypatch.setattr(checker, "find_fault", refused)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBVZeroBubble", "DualPipeV", "Combined1F1B", "V-Min"):
        stages = 8 if name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "V-Min") else 4
        made = make_table(name, 4, stages, 12)
        for table in (made, add_send_recv(made)):
            checker.check(table, ranks=4, stages=stages, microbatches=12)
