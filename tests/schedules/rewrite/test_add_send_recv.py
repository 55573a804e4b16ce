"""add_send_recv: torch's placement of messages, on any table, and one total order that all ranks agree on."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import SENDS, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples


def torch_communication(schedule: Schedule) -> dict[int, list[str]]:
    lists = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row if action]
        for rank, row in enumerate(schedule.table)
    }
    made = torch_schedules._add_send_recv(lists, schedule.rank_of_stage.__getitem__, schedule.stages)
    return {rank: [str(action) for action in row] for rank, row in made.items()}


def ours(schedule: Schedule) -> dict[int, list[str]]:
    made = add_send_recv(schedule)
    assert (made.stages, made.microbatches, made.name) == (schedule.stages, schedule.microbatches, schedule.name)
    return {rank: [str(action) for action in row] for rank, row in enumerate(made.table)}


@pytest.mark.parametrize(("ranks", "local", "microbatches"), [*product([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 8, 12])])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_named_schedules_equal_torch(name: str, ranks: int, local: int, microbatches: int) -> None:
    if name == "Interleaved1F1B" and microbatches % max(1, microbatches // ranks):
        microbatches = 2 * ranks
    schedule = make_table(name, ranks, ranks * local, microbatches)
    assert ours(schedule) == torch_communication(schedule)


@pytest.mark.parametrize(("ranks", "microbatches"), [*product([2, 4], [8, 11])])
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_v_and_overlapped_schedules_equal_torch(name: str, ranks: int, microbatches: int) -> None:
    """Neighbouring stages on one rank, I and W, and overlapped pairs."""
    fake = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
    make: Any = getattr(torch_schedules, name)._calculate_single_rank_operations
    schedule = make_table({rank: make(fake, rank) for rank in range(ranks)}, ranks, 2 * ranks, microbatches)
    check(schedule, ranks=ranks, stages=2 * ranks, microbatches=microbatches)
    check(add_send_recv(schedule), ranks=ranks, stages=2 * ranks, microbatches=microbatches)
    assert ours(schedule) == torch_communication(schedule)


def test_pictures_in_the_documentation_are_true() -> None:
    before = Schedule.parse("r0 0F0 0F1 .   0B0 0B1\nr1 .   1F0 1B0 1F1 1B1")
    after = Schedule.parse(
        "r0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\nr1 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    assert add_send_recv(before) == after


@given(st.sampled_from(["GPipe", "1F1B", "LoopedBFS"]), st.integers(2, 6), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(60))
def test_messages_form_one_total_order(name: str, ranks: int, microbatches: int) -> None:
    """Replaying the rows with one message at a time in the whole machine never gets stuck."""
    schedule = make_table(name, ranks, ranks, microbatches)
    made = add_send_recv(schedule)
    queues = [[action for action in row if action and action.is_communication] for row in made.table]
    while any(queues):
        heads = {queue[0]: queue for queue in queues if queue}
        ready = [
            (send, receive)
            for send in heads
            if send.kind in SENDS
            for receive in heads
            if receive.microbatch == send.microbatch
            and (receive.kind, receive.stage)
            == ((Kind.RECV_F, send.stage + 1) if send.kind is Kind.SEND_F else (Kind.RECV_B, send.stage - 1))
        ]
        assert ready
        for action in ready[0]:
            heads[action].pop(0)
    computations = [[action for action in row if action and action.is_compute] for row in made.table]
    assert computations == [[action for action in row if action] for row in schedule.table]


def test_twice_is_refused() -> None:
    made = add_send_recv(make_table("1F1B", 2, 2, 2))
    with pytest.raises(ScheduleError, match="1F1B has sends and receives already"):
        add_send_recv(made)


def test_a_deadlock_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stops at rank 0: 0B0, rank 1: 1F1; `check` names the cycle"):
        add_send_recv(Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
