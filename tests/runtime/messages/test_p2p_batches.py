"""Batches of sends and receives in pipelines over gloo: the numbers are bit-equal to the plain loop's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from graphpp import Schedule
from graphpp.parallel import transport
from graphpp.runtime.messages import mailbox
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import VERBS, batch_p2p
from graphpp.schedules.table.actions import Kind
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.special_models import CUTS
from tests.training import CASES, compiled, differences, eager, local_grads, same, step, trained

ZBV = ["0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1", "1F0 2F0 1F1 2F1 2I0 2W0 1I0 2I1 1W0 2W1 1I1 1W1"]


def table(name: str, ranks: int, microbatches: int) -> Schedule:
    made = Schedule.of(ZBV) if name == "ZBV" else make_table(name, ranks, 4 if name != "1F1B" else ranks, microbatches)
    return add_send_recv(made)


def calls(schedule: Schedule) -> int:
    return sum(action.is_communication for _, _, action in schedule.cells())


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "verbs"),
    [
        ("1F1B", 2, 8, ("send_forward_recv_backward",)),
        *further(("1F1B", 4, 8, ("send_backward_recv_forward",)), ("1F1B", 4, 4, ("send_forward_recv_forward",))),
        ("GPipe", 4, 6, ("send_backward_recv_backward",)),
        *further(("1F1B", 4, 8, ("all",)), ("Interleaved1F1B", 2, 8, ("all",))),
        ("Interleaved1F1B", 2, 8, tuple(VERBS)),
        ("ZBV", 2, 2, tuple(VERBS)),
    ],
)
def test_each_verb(name: str, ranks: int, microbatches: int, verbs: tuple[str, ...]) -> None:
    """Schedules with ranks at the ends and in the middle, and with several stages per rank."""
    single = table(name, ranks, microbatches)
    fused = batch_p2p(single, verbs)
    assert calls(fused) < calls(single)
    split = CUTS[fused.stages]
    numbers = trained(ranks, "skip", split=split, schedule=fused, microbatches=microbatches, steps=1)
    assert differences(numbers, eager("skip", microbatches, steps=1)) == []


def counted(rank: int, schedule: Schedule) -> tuple[list[int], int, dict[str, Any], list[Any]]:
    """The number of operations in each call of gloo that posts messages, the number of calls, gradients, losses."""
    posted: list[int] = []
    found = transport.same_host
    together, alone = dist.batch_isend_irecv, mailbox.post

    def batch(ops: list[dist.P2POp]) -> list[dist.Work]:
        posted.append(len(ops))
        return together(ops)

    def one(pending: mailbox.Message, over: transport.Transport) -> Sequence[transport.Work]:
        posted.append(len(pending.elements))
        return alone(pending, over)

    dist.batch_isend_irecv, mailbox.post = batch, one
    transport.same_host = lambda group: None  # as on two hosts
    try:
        case = CASES["plain"]()
        pipe = compiled(case, split=CUTS[2], schedule=schedule, microbatches=schedule.microbatches)
        result = step(pipe, case.batch)
        return posted, len(posted), local_grads(pipe), [loss.item() for loss in result.losses]
    finally:
        dist.batch_isend_irecv, mailbox.post, transport.same_host = together, alone, found


def test_the_steady_state_makes_one_call_where_there_were_two() -> None:
    """Counts the operations in torch's calls; the numbers are bit-equal."""
    single = table("1F1B", 2, 8)
    fused = batch_p2p(single)
    before, after = run_ranks(counted, 2, single), run_ranks(counted, 2, fused)
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        assert one[1] == 16
        assert other[1] == 16 - 7
        assert sum(one[0]) == sum(other[0])
        assert max(other[0]) == 2 * max(one[0])
        assert one[3] == other[3]
        assert all(same(other[2][fqn], grad) for fqn, grad in one[2].items()), rank
    assert [len([a for a in row if a and a.kind is Kind.P2P]) for row in fused.table] == [7, 7]


def test_an_evaluation_of_a_fused_table() -> None:
    run_ranks(evaluates, 2, batch_p2p(table("1F1B", 2, 4)))


def evaluates(rank: int, schedule: Schedule) -> None:
    case = CASES["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule=schedule, microbatches=4)
    step(pipe, case.batch)
    losses = pipe.eval(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses
    assert losses.shape == (4,)
