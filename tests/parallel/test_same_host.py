"""Messages through shared memory: sizes, order, full slots, exchanges of all ranks, ranks that end or are late."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpp._torch.distributed import default_store, set_timeout
from graphpp.parallel import transport
from graphpp.parallel.groups import PeerLost
from graphpp.parallel.same_host.memory import SLOTS, Secret
from graphpp.parallel.same_host.messages import SameHost
from graphpp.parallel.transport import BackendTransport, connect, same_host, transport_of
from tests.distributed import WorkerDied, rank_outcomes, run_ranks

CPU = torch.device("cpu")
LEAST = -(2**63)  # of an integer of 64 bits
SOON = 200.0  # seconds, far below the timeout of the ranks' process group


def connected() -> SameHost:
    connect(dist.group.WORLD)
    found = same_host(dist.group.WORLD)
    assert found is not None
    return found


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [[()], [(0,)], [(3, 5), (), (7,)], [(2**16,)], [(3,)], [(2**18,), (2,)], [(1,)]]  # slots grow, and are used again


def exchanged(rank: int) -> list[bool]:
    """Both ranks send messages of all shapes several times, more than there are slots, before they read one."""
    host, found = connected(), []
    for turn in range(3):
        messages = [[numbers(100 * turn + at, *shape) for shape in shapes] for at, shapes in enumerate(SHAPES)]
        if rank == 0:
            for message in messages:
                host.send(message, 1)
        arrived = [[torch.empty(shape) for shape in shapes] for shapes in SHAPES]
        arrivals = [host.expect(into, 1 - rank) for into in arrived]
        if rank == 1:
            for message in messages:
                host.send(message, 0)
        for arrival in reversed(arrivals):
            arrival.wait()
        assert all(arrival.is_completed() for arrival in arrivals)
        pairs = zip(messages, arrived, strict=True)
        found.append(all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True)))
    return found


def test_messages_of_all_sizes_in_order() -> None:
    assert run_ranks(exchanged, 2) == [[True] * 3] * 2


def crossing(rank: int) -> list[float]:
    """Each rank posts its receives, then sends more than fits, at the same time as the other one."""
    host, count = connected(), 5 * SLOTS
    arrived = [torch.empty(1) for _ in range(count)]
    arrivals = [host.expect([into], 1 - rank) for into in arrived]
    for index in range(count):
        host.send([torch.tensor([float(index + 100 * rank)])], 1 - rank)
    for arrival in arrivals:
        arrival.wait()
    return [float(each) for each in arrived]


def test_two_ranks_that_send_to_each_other_with_full_slots() -> None:
    first, second = run_ranks(crossing, 2)
    assert second == [float(index) for index in range(5 * SLOTS)]
    assert first == [value + 100 for value in second]


def posting(rank: int) -> list[bool]:
    """Rank 0 fills its slots, and rank 1 posts the receives without waiting: whether each message is there, each slot free."""
    host, peer = connected(), 1 - rank
    if rank == 0:
        for index in range(SLOTS):
            host.send([torch.tensor([float(index)])], peer)
    dist.barrier()
    posted = [host.expect([torch.empty(1)], peer) for _ in range(SLOTS)] if rank else []
    there = [each.there for each in posted]
    dist.barrier()
    return there if rank else [slot.free for slot in host._peers[peer].outbox.slots]


def test_a_rank_that_posts_receives_frees_slots() -> None:
    assert run_ranks(posting, 2) == [[True] * SLOTS] * 2


def together(rank: int) -> tuple[list[int], list[float], float]:
    """Exchanges of all ranks do not meet the messages of a step, which are read later."""
    host = connected()
    if rank == 0:
        host.send([torch.tensor([7.0])], 2)
    largest = host.largest([rank, -rank, 5, LEAST, -1 - LEAST])
    values = torch.full((2,), float(rank))
    host.broadcast(values, 1)
    read = torch.zeros(1)
    if rank == 2:
        host.expect([read], 0).wait()
    return largest, values.tolist(), float(read)


def test_exchanges_of_all_ranks() -> None:
    assert run_ranks(together, 3) == [([2, 0, 5, LEAST, -1 - LEAST], [1.0, 1.0], read) for read in (0.0, 0.0, 7.0)]


def sends_and_ends(rank: int) -> float:
    """Rank 0 sends into new memory and ends at once; rank 1 reads later."""
    host, read = connected(), torch.zeros(4)
    if rank == 0:
        host.send([torch.ones(4)], 1)
        host.settle()
        os._exit(0)
    host.expect([read], 0).wait()
    time.sleep(0.5)
    return float(read.sum())


def test_a_message_is_there_when_its_sender_has_ended() -> None:
    sender, reader = rank_outcomes(sends_and_ends, 2)
    assert isinstance(sender.error, WorkerDied)
    assert reader.value == 4.0


def waits_for_nothing(rank: int, how: str) -> tuple[int | None, str, float]:
    """Rank 1 ends, or sends nothing within the group's timeout, while rank 0 waits for it."""
    host = connected()
    dist.barrier()
    if rank == 1:
        if how == "ends":
            os._exit(0)
        default_store().wait(["given up"], timedelta(seconds=SOON))
        return None, "", 0.0
    set_timeout(dist.group.WORLD, timedelta(seconds=1 if how == "late" else 2 * SOON))
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        host.expect([torch.empty(1)], 1).wait()
    default_store().set("given up", "")
    return caught.value.peer, str(caught.value), time.monotonic() - began


def test_a_rank_that_ends_is_noticed_at_once() -> None:
    waiting = rank_outcomes(waits_for_nothing, 2, "ends")[0]
    assert waiting.error is None
    assert waiting.value[0] == 1 and "Connection closed by peer" in waiting.value[1] and waiting.value[2] < SOON


def test_a_rank_that_is_late_is_given_the_time_of_the_group() -> None:
    peer, text, seconds = run_ranks(waits_for_nothing, 2, "late")[0]
    assert peer == 1 and text.startswith("Timed out waiting 1000ms") and 0.9 < seconds < SOON


def of_other_sizes(rank: int) -> str:
    host = connected()
    if rank == 0:
        host.send([torch.ones(3)], 1)
        return ""
    with pytest.raises(PeerLost) as caught:
        host.expect([torch.empty(4)], 0).wait()
    return str(caught.value)


def test_a_message_of_another_size_is_refused() -> None:
    assert run_ranks(of_other_sizes, 2)[1] == "rank 0 of the group sent 12 bytes where 16 are expected"


def hidden(rank: int) -> list[bool]:
    """Rank 1 cannot see the memory of the others, or finds another process's there."""

    def unseen(process: int, handle: int) -> int:
        raise PermissionError

    found = []
    for broken in (unseen, lambda process, handle: 1):
        group = dist.new_group([0, 1, 2])
        with patch.object(Secret, "read", broken if rank == 1 else Secret.read):
            connect(group)
        found.append(same_host(group) is None and isinstance(transport_of(group, CPU), BackendTransport))
    with patch.object(transport, "_ABLE", rank != 0):
        group = dist.new_group([0, 1, 2])
        connect(group)
    return [*found, same_host(group) is None]


def test_ranks_that_do_not_see_each_other_use_the_group() -> None:
    assert run_ranks(hidden, 3) == [[True] * 3] * 3
