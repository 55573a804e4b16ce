"""Batches of sends and receives: free of deadlock, no action lost, and 1F1B makes one call where it made two."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite import p2p_batches as batches
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import VERBS, batch_p2p
from graphpp.schedules.rewrite.unbatch_p2p import unbatch_p2p
from graphpp.schedules.table.actions import SENDS, Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import Machine, named, random_rows, rows_of


def proved(schedule: Schedule) -> Schedule:
    check(schedule, ranks=schedule.ranks, stages=schedule.stages, microbatches=schedule.microbatches)
    return schedule


def calls(schedule: Schedule, rank: int) -> list[frozenset[Kind]]:
    """The kinds of each call that a rank makes."""
    row = schedule.table[rank]
    return [frozenset(leaf.kind for leaf in a.leaves) for a in row if a is not None and a.is_communication]


def random_table(random: Random) -> Schedule:
    ranks = random.randint(1, 4)
    stages, microbatches = ranks + random.randint(0, 4), random.randint(1, 5)
    rows = random_rows(random, ranks, stages, microbatches)
    return add_send_recv(Schedule.of(rows, stages=stages, microbatches=microbatches))


TABLES = st.randoms(use_true_random=False).map(random_table) | named().map(add_send_recv)


@given(TABLES, st.lists(st.sampled_from(sorted(VERBS)), min_size=1, unique=True))
@settings(deadline=None, max_examples=examples(120))
def test_any_table(schedule: Schedule, verbs: list[str]) -> None:
    fused = proved(batch_p2p(schedule, verbs))
    assert (fused.stages, fused.microbatches, fused.name) == (schedule.stages, schedule.microbatches, schedule.name)
    assert Machine(rows_of(fused), schedule.stages).runs_to_its_end()
    assert Schedule.parse(str(fused)) == fused
    for before, after in zip(rows_of(schedule), rows_of(fused), strict=True):
        assert Counter(leaf for action in before for leaf in action.leaves) == Counter(
            leaf for action in after for leaf in action.leaves
        )
        assert [a for a in before if not a.is_communication] == [a for a in after if not a.is_communication]
        for batch in (action for action in after if action.kind is Kind.P2P):
            kinds = {part.kind for part in batch.parts}
            assert len(kinds) == len(batch.parts) > 1
            assert any(kinds <= VERBS[verb].kinds for verb in verbs)
    # Without its batches the table runs too.
    apart = proved(unbatch_p2p(fused))
    assert not any(action.kind is Kind.P2P for _, _, action in apart.cells())
    assert Machine(rows_of(apart), schedule.stages).runs_to_its_end()


@given(TABLES)
@settings(deadline=None, max_examples=examples(40))
def test_pairs_have_one_peer_and_sends_pass_no_computation(schedule: Schedule) -> None:
    fused = batch_p2p(schedule)
    for before, after in zip(rows_of(schedule), rows_of(fused), strict=True):
        for batch in (action for action in after if action.kind is Kind.P2P):
            peers = {part.stage + (1 if part.kind in (Kind.SEND_F, Kind.RECV_B) else -1) for part in batch.parts}
            assert len({schedule.rank_of_stage[peer] for peer in peers}) == 1
        assert computed_at_sends(before) == computed_at_sends(after)


def computed_at_sends(row: list[Action]) -> dict[Action, int]:
    """For each send the number of computations before it."""
    found, computed = dict[Action, int](), 0
    for action in row:
        computed += action.is_compute
        found |= {leaf: computed for leaf in action.leaves if leaf.kind in SENDS}
    return found


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 9), (3, 8), (4, 8), (4, 16), (8, 16)])
def test_the_steady_state_of_1f1b_calls_once_where_it_called_twice(ranks: int, microbatches: int) -> None:
    schedule = add_send_recv(make_table("1F1B", ranks, ranks, microbatches))
    fused = proved(batch_p2p(schedule))
    for rank in range(ranks):
        to_next = frozenset({Kind.SEND_F, Kind.RECV_B}) if rank < ranks - 1 else frozenset[Kind]()
        to_last = frozenset({Kind.SEND_B, Kind.RECV_F}) if rank > 0 else frozenset[Kind]()
        warm_up = ranks - 1 - rank
        steady = Counter(calls(fused, rank))
        assert steady[to_next] == (microbatches - warm_up if to_next else 0)
        assert steady[to_last] == (microbatches - warm_up - 1 if to_last else 0)
        assert len(calls(schedule, rank)) - len(calls(fused, rank)) == steady[to_next] + steady[to_last]


def test_the_picture_in_the_documentation_is_true() -> None:
    schedule = add_send_recv(make_table("1F1B", 2, 2, 3))
    assert "1RECV_F2 1B1      1SEND_B1 1F2" in str(schedule)
    assert "1B1 (1RECV_F2;1SEND_B1)P2P 1F2" in str(batch_p2p(schedule))


@pytest.mark.parametrize(
    ("verb", "name", "ranks", "local"),
    [
        ("send_forward_recv_backward", "1F1B", 4, 1),
        ("send_backward_recv_forward", "1F1B", 4, 1),
        ("send_forward_recv_forward", "GPipe", 4, 1),
        ("send_backward_recv_backward", "GPipe", 4, 1),
        ("send_forward_recv_forward", "Interleaved1F1B", 2, 2),
        ("all", "1F1B", 4, 1),
        ("all", "Interleaved1F1B", 2, 2),
        ("all", "Interleaved1F1B", 4, 2),
    ],
)
def test_each_verb_is_used(verb: str, name: str, ranks: int, local: int) -> None:
    """Each verb alone makes batches with all of its kinds, and fewer calls in all."""
    schedule = add_send_recv(make_table(name, ranks, ranks * local, 8))
    fused = proved(batch_p2p(schedule, [verb]))
    made = Counter(kinds for rank in range(ranks) for kinds in calls(fused, rank))
    assert made[VERBS[verb].kinds] >= 3
    assert sum(made.values()) < len([a for _, _, a in schedule.cells() if a.is_communication])


def test_a_batch_that_would_close_a_cycle_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check for cycles some joins would deadlock."""
    schedule = add_send_recv(make_table("Interleaved1F1B", 4, 8, 8))
    proved(batch_p2p(schedule))
    monkeypatch.setattr(batches, "_exchanged", lambda order, old, new: True)
    with pytest.raises(ScheduleError, match="deadlock"):
        proved(batch_p2p(schedule))


def test_refusals() -> None:
    schedule = add_send_recv(make_table("1F1B", 2, 2, 3))
    with pytest.raises(ScheduleError, match="unknown verb 'send'; take send_forward_recv_backward, "):
        batch_p2p(schedule, ["send"])
    crossed = Schedule.of(
        [
            "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
        ]
    )
    with pytest.raises(ScheduleError, match="custom has a deadlock before anything is fused"):
        batch_p2p(crossed)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_even_ranks_talk_while_odd_ranks_listen(ranks: int) -> None:
    fused = batch_p2p(add_send_recv(make_table("1F1B", ranks, ranks, 8)))
    apart = proved(unbatch_p2p(fused))
    for rank, (batched, single) in enumerate(zip(rows_of(fused), rows_of(apart), strict=True)):
        at = 0
        for action in batched:
            parts = single[at : at + len(action.leaves)]
            at += len(action.leaves)
            assert {*parts} == {*action.leaves}
            sends = [part.kind in SENDS for part in parts]
            assert sends == sorted(sends, reverse=rank % 2 == 0)


def test_the_forwards_of_a_batched_table_are_checked_like_any_other() -> None:
    """Two ranks that exchange in one batch would wait for each other if the messages were single."""
    fused = batch_p2p(add_send_recv(make_table("ZBVZeroBubble", 3, 6, 3)), tuple(VERBS))
    forwards = fused.forward_only()
    assert any(action.kind is Kind.P2P for _, _, action in forwards.cells())
    check(forwards, ranks=3, stages=6, microbatches=3, training=False)
