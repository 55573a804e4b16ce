"""Hoisted receives: only receives move, channels keep their order, few receives are ahead, and no run gets stuck."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.schedules.generate import names as schedules
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.table.actions import SENDS, Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.tables import Rows, named, rows_of, tables

RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def peer(leaf: Action, home: dict[int, int]) -> int:
    return home[leaf.stage + (1 if leaf.kind in (Kind.SEND_F, Kind.RECV_B) else -1)]


def leaves(row: list[Action]) -> list[Action]:
    return [leaf for action in row for leaf in action.leaves]


def channels(row: list[Action], home: dict[int, int]) -> dict[int, list[Action]]:
    """The receives of a rank from each other rank, in order."""
    found: dict[int, list[Action]] = defaultdict(list)
    for leaf in leaves(row):
        if leaf.kind in RECEIVES:
            found[peer(leaf, home)].append(leaf)
    return found


class Buffered:
    """Ranks over a transport on which a receive never blocks, and a send waits for its rank's earlier sends.

    A send ends when its receive is posted: no message is buffered.
    """

    def __init__(self, rows: Rows, home: dict[int, int]) -> None:
        self.todo, self.home = [list(row) for row in rows], home
        self.posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self.sent: dict[tuple[int, int], list[Action]] = defaultdict(list)

    def runs_to_its_end(self) -> bool:
        while any([self.step(rank) for rank in range(len(self.todo))]):
            pass
        return not any(self.todo) and all(self.sends_are_over(rank) for rank in range(len(self.todo)))

    def step(self, rank: int) -> bool:
        """Run the next action if no part of it has to wait."""
        if not self.todo[rank]:
            return False
        own = self.todo[rank][0].leaves
        if any(leaf.kind in SENDS for leaf in own) and not self.sends_are_over(rank):
            return False
        if not all(self.arrived(rank, leaf) for leaf in own):
            return False
        self.todo[rank].pop(0)
        for leaf in own:
            if leaf.kind in SENDS:
                self.sent[rank, peer(leaf, self.home)].append(leaf)
            elif leaf.kind in RECEIVES:
                self.posted[peer(leaf, self.home), rank].append(leaf)
        return True

    def sends_are_over(self, rank: int) -> bool:
        return all(len(self.posted[key]) >= len(sent) for key, sent in list(self.sent.items()) if key[0] == rank)

    def arrived(self, rank: int, leaf: Action) -> bool:
        """True if the inputs of a computation have arrived; checks that they are the right ones."""
        receive = leaf._replace(kind=Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B)
        key = next((key for key, each in self.posted.items() if key[1] == rank and receive in each), None)
        if leaf.kind not in (Kind.F, Kind.B, Kind.I) or key is None:
            return True
        at = self.posted[key].index(receive)
        if at >= len(self.sent[key]):
            return False
        came = self.sent[key][at]
        step = 1 if receive.kind is Kind.RECV_F else -1
        way = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
        assert came == Action(receive.stage - step, way, leaf.microbatch)
        return True


def check_moved(rows: Rows, home: dict[int, int], ahead: int) -> None:
    early = rows_of(hoist_receives(Schedule.of(rows), ahead))
    for row, moved in zip(rows, early, strict=True):
        check_rank(row, moved, home, ahead)
    assert Buffered(early, home).runs_to_its_end()
    assert hoist_receives(Schedule.of(rows), 0) == Schedule.of(rows)


def check_rank(row: list[Action], moved: list[Action], home: dict[int, int], ahead: int) -> None:
    assert [each for each in moved if each.kind not in RECEIVES] == [each for each in row if each.kind not in RECEIVES]
    assert channels(moved, home) == channels(row, home)
    posted = {leaf: at for at, leaf in enumerate(leaves(moved))}
    others = [leaf for leaf in leaves(row) if leaf.kind not in RECEIVES]
    for at, other in enumerate(others):
        here, there = posted[other], leaves(row).index(other)
        before = {leaf for leaf in leaves(moved)[:here] if leaf.kind in RECEIVES}
        usual = {leaf for leaf in leaves(row)[:there] if leaf.kind in RECEIVES}
        assert usual <= before, at
        for each in channels(sorted(before - usual), home).values():
            assert len(each) <= ahead


@given(tables(sharding=False), st.integers(1, 3))
def test_any_table(table: tuple[Rows, int, int, Random], ahead: int) -> None:
    rows, *_ = table
    home = {leaf.stage: rank for rank, row in enumerate(rows) for leaf in leaves(row)}
    check_moved(rows, home, ahead)


@given(named(), st.integers(1, 3), st.booleans())
def test_named_schedules(schedule: schedules.Schedule, ahead: int, fused: bool) -> None:
    made = add_send_recv(schedule)
    made = batch_p2p(made) if fused and made.has_communication else made
    check_moved(rows_of(made), dict(made.rank_of_stage), ahead)


@pytest.mark.parametrize(
    ("ahead", "row"),
    [
        (1, "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2"),
        (2, "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B2 0B0 0F2 0SEND_F2 0B1 0B2"),
    ],
)
def test_1f1b_on_two_ranks(ahead: int, row: str) -> None:
    made = add_send_recv(schedules.one_f_one_b(2, 2, 3))
    assert " ".join(map(str, rows_of(hoist_receives(made, ahead))[0])) == row
