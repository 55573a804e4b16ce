"""Peak bytes: counted by hand on small tables, by an independent sum on random ones, and against a cap."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.peak_memory import Peak, peak_bytes, peaks
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Kind, parse
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import Rows, tables


def of_bytes(*stages: tuple[int, int | None]) -> Costs:
    return Costs(tuple(StageCosts(saved_bytes=saved, kept_bytes=kept) for saved, kept in stages))


@pytest.mark.parametrize(
    ("row", "costs", "peak"),
    [
        ("0F0 0B0", [(10, None)], Peak(0, 0, 10)),
        ("0F0 0F1 0B0 0F2 0B1 0B2", [(10, None)], Peak(0, 1, 20)),
        (". . 0F0 0F1 0B0 0B1", [(10, None)], Peak(0, 3, 20)),
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, None)], Peak(0, 3, 30)),  # all bytes are kept for W
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, 4)], Peak(0, 3, 24)),
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, 0)], Peak(0, 1, 20)),
        ("0F0 0I0 0W0", [(10, 14)], Peak(0, 1, 14)),  # more bytes may be kept than were saved
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", [(10, None)], Peak(0, 1, 20)),  # the bytes of both parts are alive together
        ("0F0 1F0 1B0 0B0", [(10, None), (5, None)], Peak(0, 1, 15)),
        ("0F0 0F1", [(10, None)], Peak(0, 0, 10)),  # no backward: the bytes are freed at the end of each forward
    ],
)
def test_peaks(row: str, costs: list[tuple[int, int | None]], peak: Peak) -> None:
    assert peaks(Schedule.of([row]), of_bytes(*costs)) == (peak,)


def test_what_is_away_is_not_alive() -> None:
    """Of the 10 bytes of microbatch 0, 6 are offloaded from the end of 0F1 to the start of 0B1."""
    schedule = Schedule.of(["0F0 0F1 0F2 0F3 0B1 0B0 0B2 0B3"])
    trip = OffloadWindow(0, 0, ("value",), 6, parse("0F1"), parse("0B1"), parse("0B0"))
    assert peaks(schedule, of_bytes((10, None)), [trip]) == (Peak(0, 4, 40),)
    shorter = Schedule.of(["0F0 0F1 0F2 0B2 0B1 0B0"])
    assert peaks(shorter, of_bytes((10, None)), [trip]) == (Peak(0, 2, 24),)


@pytest.mark.parametrize("messages", [False, True])
def test_1f1b_holds_what_is_in_flight(messages: bool) -> None:
    for ranks, microbatches in [(4, 8), (3, 2), (5, 5), (1, 3)]:
        schedule = make_table("1F1B", ranks, ranks, microbatches)
        schedule = add_send_recv(schedule) if messages else schedule
        found = peak_bytes(schedule, Costs.unit(ranks, ranks))
        assert found == tuple(1000 * min(microbatches, ranks - rank) for rank in range(ranks))


@given(tables())
@settings(deadline=None, max_examples=examples(100))
def test_any_table(table: tuple[Rows, int, int, Random]) -> None:
    """At each action of a rank: the sum over the actions begun by then whose activations are not freed yet."""
    rows, stages, microbatches, random = table
    costs = of_bytes(*((random.randint(0, 9), random.choice([None, random.randint(0, 9)])) for _ in range(stages)))
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    for row, found in zip(rows, peaks(schedule, costs), strict=True):
        at = {leaf: column for column, action in enumerate(row) for leaf in action.leaves}
        alive = [0]
        for now in range(len(row)):
            alive.append(0)
            for leaf, begun in at.items():
                if leaf.kind is Kind.F and begun <= now:
                    stage = costs.stages[leaf.stage]
                    saved, kept = stage.saved_bytes, stage.saved_bytes if stage.kept_bytes is None else stage.kept_bytes
                    whole = at.get(leaf._replace(kind=Kind.B), at.get(leaf._replace(kind=Kind.I), -1))
                    rest = at.get(leaf._replace(kind=Kind.W), -1)
                    alive[-1] += saved if now <= whole else kept if now <= rest else 0
        assert found.nbytes == max(alive)


def test_a_cap() -> None:
    schedule, costs = add_send_recv(make_table("1F1B", 4, 4, 8)), Costs.unit(4, 4)
    for cap in (4000, [4000, 3000, 2000, 1000]):
        check(schedule, ranks=4, stages=4, microbatches=8, costs=costs, memory_cap=cap)
    with pytest.raises(ScheduleError) as caught:
        check(schedule, ranks=4, stages=4, microbatches=8, costs=costs, memory_cap=3500)
    assert str(caught.value) == (
        "schedule '1F1B', rank 0, column 6: 4,000 bytes of activations are alive here, more than the cap of 3,500; "
        "run a backward, or a held back W, earlier, or forwards later, or recompute in these stages\n"
        "    r0 ... 0SEND_F1 0F2 0SEND_F2 >>> 0F3 <<< 0SEND_F3 0RECV_B0 0B0 ..."
    )
    with pytest.raises(ScheduleError, match=r"rank 2, column 4: 2,000 bytes .* the cap of 1,999"):
        check(schedule, ranks=4, stages=4, microbatches=8, costs=costs, memory_cap=[4000, 3000, 1999, 1000])


def test_what_does_not_fit() -> None:
    schedule = make_table("1F1B", 2, 2, 2)
    with pytest.raises(ScheduleError, match=r"memory_cap is in bytes, .* give costs="):
        check(schedule, ranks=2, stages=2, microbatches=2, memory_cap=1)
    with pytest.raises(ScheduleError, match="memory_cap has bytes for 3 ranks, but 2 run"):
        check(schedule, ranks=2, stages=2, microbatches=2, costs=Costs.unit(2, 2), memory_cap=[1, 1, 1])
    with pytest.raises(ScheduleError, match="has 2 stages, the costs are of 3"):
        peak_bytes(schedule, Costs.unit(3, 3))
