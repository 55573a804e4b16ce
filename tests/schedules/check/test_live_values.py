"""Bytes of activations and messages: counted by hand on small tables, by an independent sum on random ones, against a cap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from random import Random

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.step_memory import peak_bytes, step_bytes, step_peaks
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Action, Kind, parse
from graphpp.schedules.table.costs import Costs, MessageFlow, StageCosts
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import Rows, tables


def peaks(schedule: Schedule, costs: Costs, offloaded: Sequence[OffloadWindow] = ()) -> list[tuple[int, int]]:
    """(column, bytes) of the peak of each rank."""
    return [(peak.column, peak.nbytes) for peak in step_peaks(schedule, costs, offloaded=offloaded)]


def of_bytes(*stages: tuple[int, int | None]) -> Costs:
    again = StageCosts(saved_bytes=100)
    return Costs(tuple(StageCosts(saved_bytes=saved, kept_bytes=kept, ahead=again) for saved, kept in stages))


@pytest.mark.parametrize(
    ("row", "costs", "peak"),
    [
        ("0F0 0B0", [(10, None)], (0, 10)),
        ("0F0 0F1 0B0 0F2 0B1 0B2", [(10, None)], (1, 20)),
        (". . 0F0 0F1 0B0 0B1", [(10, None)], (3, 20)),
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, None)], (3, 30)),  # all bytes are kept for W
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, 4)], (3, 24)),
        ("0F0 0F1 0I0 0F2 0W0 0B1 0B2", [(10, 0)], (1, 20)),
        ("0F0 0I0 0W0", [(10, 14)], (1, 14)),  # more bytes may be kept than were saved
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", [(10, None)], (1, 20)),  # the bytes of both parts are alive together
        ("0F0 1F0 1B0 0B0", [(10, None), (5, None)], (1, 15)),
        ("0F0 0F1 0R0 0B0 0R1 0B1", [(10, None)], (2, 110)),  # of each microbatch 100 from R on
        ("0F0 0F1 0R1 0R0 0I0 0I1 0W0 0W1", [(10, None)], (3, 200)),
        ("0F0 0R0 0I0 0F1 0W0 0B1", [(10, None)], (3, 110)),  # all of them are kept for W
        ("0F0 0F1", [(10, None)], (0, 10)),  # no backward: the bytes are freed at the end of each forward
    ],
)
def test_peaks(row: str, costs: list[tuple[int, int | None]], peak: tuple[int, int]) -> None:
    assert peaks(Schedule.of([row]), of_bytes(*costs)) == [peak]


def test_what_is_away_is_not_alive() -> None:
    """Of the 10 bytes of microbatch 0, 6 are offloaded from the end of 0F1 to the start of 0B1."""
    schedule = Schedule.of(["0F0 0F1 0F2 0F3 0B1 0B0 0B2 0B3"])
    trip = OffloadWindow(0, 0, ("value",), 6, parse("0F1"), parse("0B1"), parse("0B0"))
    assert peaks(schedule, of_bytes((10, None)), [trip]) == [(4, 40)]
    shorter = Schedule.of(["0F0 0F1 0F2 0B2 0B1 0B0"])
    assert peaks(shorter, of_bytes((10, None)), [trip]) == [(2, 24)]


class Lives:
    """The bytes at each place of a row: `at[2 * column]` while an action runs, the next one after it."""

    def __init__(self, columns: int) -> None:
        self.at = [0] * (2 * columns)

    def add(self, nbytes: int, first: int, last: int) -> None:
        for place in range(first, min(last, len(self.at) - 1) + 1):
            self.at[place] += nbytes


@given(tables())
@settings(deadline=None, max_examples=examples(100))
def test_any_table(table: tuple[Rows, int, int, Random]) -> None:
    """At each place of a row: the sum over all values that are made or arrive by then, and are not freed yet."""
    rows, stages, microbatches, random = table
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    flow = MessageFlow(kept=random.randint(0, 2))
    kinds = [Costs(tuple(some_bytes(random) for _ in range(stages)), flow=flow) for _ in range(2)]
    costs = [random.choice(kinds) for _ in range(microbatches)]
    for row, found in zip(rows, step_bytes(schedule, costs), strict=True):
        *totals, at_end = [sum(parts.values()) for _, parts in found]
        assert totals == [0, *lives(row, schedule, costs).at]
        assert at_end == 0


def some_bytes(random: Random) -> StageCosts:
    def some() -> int:
        return random.randint(0, 9)

    received, sent = ({kind: some() for kind in kinds} for kinds in ((Kind.F, Kind.B), (Kind.F, Kind.B, Kind.I)))
    running = {kind: 3 * some() for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    kept, again = random.choice([None, some()]), {kind: 3 * some() for kind in running}
    ahead = StageCosts(saved_bytes=some(), kept_bytes=random.choice([None, some()]), peak_bytes=again)
    return StageCosts(1.0, 1.0, 1.0, None, some(), kept, running, received, sent, ahead=ahead)


def lives(row: list[Action], schedule: Schedule, costs: Sequence[Costs]) -> Lives:
    """The independent sum; `costs`: by microbatch."""
    found = Lives(len(row))
    at = {leaf: column for column, action in enumerate(row) for leaf in action.leaves}
    leaving = defaultdict[int, list[tuple[int, int, int]]](list)  # by rank: (column, place in a batch, bytes) of sent values
    for leaf, column in at.items():
        stage, here = costs[leaf.microbatch or 0].stages[leaf.stage], 2 * column
        again = at.get(leaf._replace(kind=Kind.R))
        later = stage if again is None or stage.ahead is None else stage.ahead
        kept = later.saved_bytes if later.kept_bytes is None else later.kept_bytes
        whole = next((at[each] for kind in (Kind.B, Kind.I) if (each := leaf._replace(kind=kind)) in at), None)
        if leaf.is_compute:
            add_running(found, stage, later, (leaf.kind, here, whole))
        if leaf.kind is Kind.F:
            found.add(stage.saved_bytes, here, here if whole is None else 2 * whole if again is None else 2 * again - 1)
            rest = at.get(leaf._replace(kind=Kind.W))
            if rest is not None and whole is not None:
                found.add(kept, 2 * whole + 1, 2 * rest)
        if leaf.kind in (Kind.RECV_F, Kind.RECV_B):
            reader = at[leaf._replace(kind=Kind.F)] if leaf.kind is Kind.RECV_F else whole
            assert reader is not None
            found.add(stage.received_bytes[Kind(leaf.kind.value[-1])], here, 2 * reader - 1)
        step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(leaf.kind)
        if step is not None and 0 <= leaf.stage + step < schedule.stages:
            readers = [leaf._replace(stage=leaf.stage + step, kind=kind) for kind in ("F" if step > 0 else "BI")]
            read = next((at[each] for each in readers if each in at), None)
            if read is not None:
                found.add(stage.sent_bytes[leaf.kind], here + 1, 2 * read - 1)
            elif schedule.has_communication:
                send = at[leaf._replace(kind=Kind.SEND_F if step > 0 else Kind.SEND_B)]
                found.add(stage.sent_bytes[leaf.kind], here + 1, 2 * send)
                batch = [(each.stage, each.microbatch) for each in row[send].leaves]
                place = batch.index((leaf.stage, leaf.microbatch))
                leaving[schedule.rank_of_stage[leaf.stage + step]].append((send, place, stage.sent_bytes[leaf.kind]))
    for sent in leaving.values():
        add_kept(found, sorted(sent), costs[0].flow.kept)
    return found


def add_running(found: Lives, stage: StageCosts, later: StageCosts, run: tuple[Kind, int, int | None]) -> None:
    """Add the bytes of a computation beyond the values that it saves, reads or keeps, and those that an R leaves behind.

    `later`: the costs behind an R; `run`: kind and place of the computation, and the column of the backward.
    """
    kind, here, backward = run
    if kind is Kind.R:
        assert backward is not None
        found.add(max(stage.saved_bytes, later.saved_bytes, later.peak_bytes[Kind.F]), here, here)
        found.add(later.saved_bytes, here + 1, 2 * backward)
        return
    own = stage if kind is Kind.F else later
    kept = own.saved_bytes if own.kept_bytes is None else own.kept_bytes
    found.add(max(0, own.peak_bytes[kind] - (kept if kind is Kind.W else own.saved_bytes)), here, here)


def add_kept(found: Lives, sent: list[tuple[int, int, int]], most: int) -> None:
    """Add the values that were sent to one rank and are kept."""
    kept: list[tuple[int, int]] = []  # bytes, first place
    for column, group in groupby(sent, key=lambda each: each[0]):
        while len(kept) >= most > 0:
            found.add(*kept.pop(0), 2 * column - 1)
        kept += [(nbytes, 2 * column + 1) for _, _, nbytes in group]
        while len(kept) > most:
            found.add(*kept.pop(0), 2 * column)
    for each in kept:
        found.add(*each, len(found.at))


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
