"""`SameHost`: sends and receives between the ranks of a group on one host, and the small exchanges of all of them.

Contract
--------
- A tensor of a message fills its memory without gaps. Its receiver knows its size, and both ranks of a pair post their messages
  in one order, apart for each channel.
- `send` copies the tensors, so it returns at once, unless `SLOTS` messages to that rank have not been read. Then it waits for
  the oldest of them. A rank reads every message whose receive is posted whenever it posts a receive or waits for anything. So
  that wait ends where the wait for a send over gloo would end, and a rank that computes without waiting still frees slots.
- After `settle` every message of this rank can be read, also if this process ends.
- `PeerLost`, in gloo's words, for a rank whose process has ended or whose process group is destroyed, and for a rank that
  sends nothing within the timeout of the group.
- One thread uses a `SameHost`. It does not keep its process group alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from graphpp._torch.distributed import timeout_of
from graphpp.parallel.groups import PeerLost, reaches
from graphpp.parallel.same_host.memory import Frame, Inbox, Peer, Slot

STEP, CONTROL = 0, 1  # channels: the messages of a table, and the exchanges of all ranks before and after it
_READ = 2  # in the place of a channel: a message was read whose sender waits for that
_SLICE = 0.25  # seconds after which a rank that waits first looks whether the other rank's connection is there


class Arrival:
    """A posted receive, with those methods of a `dist.Work` that a transport calls."""

    def __init__(self, host: SameHost, tensors: Sequence[torch.Tensor], peer: int) -> None:
        self._host, self.tensors, self.peer, self.there = host, tensors, peer, False

    def is_completed(self) -> bool:
        """Whether the message has arrived; does not wait."""
        if not self.there:
            self._host.poll()
        return self.there

    def wait(self) -> None:
        """Wait for the message. Raises `PeerLost`."""
        if not self.there:
            self._host.until(self)


class SameHost:
    """The messages of this rank: a `Transport` (`transport.py`)."""

    copies = True

    def __init__(self, group: dist.ProcessGroup, inbox: Inbox, peers: Mapping[int, Peer]) -> None:
        self.rank = dist.get_rank(group)
        self._group, self._inbox, self._peers = weakref.ref(group), inbox, peers
        self._expected: dict[tuple[int, int], deque[Arrival]] = defaultdict(deque)  # by rank and channel
        self._early: dict[tuple[int, int], deque[Frame]] = defaultdict(deque)  # messages that came before their receives

    def send(self, tensors: Sequence[torch.Tensor], peer: int, channel: int = STEP) -> Sequence[Arrival]:
        """Send tensors to a rank of the group; nothing is to be waited for. Raises `PeerLost`."""
        to, sizes = self._peers[peer], [tensor.nbytes for tensor in tensors]
        slot = to.outbox.take(sum(sizes)) or self._freed(to, sum(sizes))
        at = slot.memory.address
        for tensor, size in zip(tensors, sizes, strict=True):
            ctypes.memmove(at, tensor.data_ptr(), size)
            at += size
        slot.count += 1
        size = at - slot.memory.address
        frame = Frame(self.rank, channel, slot.number, slot.handle, slot.serial, slot.count, slot.capacity, size)
        try:
            to.write(frame)
        except BrokenPipeError:
            raise _closed(to) from None
        return ()

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Arrival]:
        """Post a receive of a step's message."""
        return (self.expect(tensors, peer),)

    def expect(self, tensors: Sequence[torch.Tensor], peer: int, channel: int = STEP) -> Arrival:
        """Post a receive: the next message of the channel from a rank of the group is written into the tensors."""
        arrival, early = Arrival(self, tensors, peer), self._early[peer, channel]
        if early:
            self._read(early.popleft(), arrival)
        else:
            self._expected[peer, channel].append(arrival)
        self.poll()
        return arrival

    def settle(self) -> None:
        """Wait until the other ranks have mapped all memory in which messages of this rank are. Raises `PeerLost`."""
        for peer in self._peers.values():
            if not peer.outbox.is_settled():
                peer.outbox.want()
                self._until(peer, peer.outbox.is_settled)
            peer.outbox.close_handles()

    def drop(self) -> None:
        """Forget the receives of a step that failed."""
        for (_, channel), arrivals in self._expected.items():
            if channel == STEP:
                arrivals.clear()

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest value of each number over all ranks; called by all of them, with as many integers of 64 bits."""
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.rank:
            self.send([own], 0, CONTROL)
            self.expect([own], 0, CONTROL).wait()
        else:
            others = [torch.empty_like(own) for _ in self._peers]
            arrivals = [self.expect([other], peer, CONTROL) for peer, other in zip(self._peers, others, strict=True)]
            for arrival in arrivals:
                arrival.wait()
            own = torch.stack([own, *others]).amax(0)
            self._send_to_all(own)
        self.settle()
        return own.tolist()

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Write the values of the rank `source` into those of all ranks; called by all of them, with one shape and dtype."""
        if self.rank == source:
            self._send_to_all(values)
            self.settle()
        else:
            self.expect([values], source, CONTROL).wait()

    # ------------------------------------------------------------------------------------------------ inside

    def until(self, arrival: Arrival) -> None:
        """Wait until a message has arrived. Raises `PeerLost`."""
        self._until(self._peers[arrival.peer], lambda: arrival.there)

    def poll(self) -> None:
        """Read the frames that have arrived."""
        while self._inbox.ready():
            self._sort(self._inbox.read())

    def _send_to_all(self, values: torch.Tensor) -> None:
        for peer in self._peers:
            self.send([values], peer, CONTROL)

    def _freed(self, peer: Peer, size: int) -> Slot:
        """A slot for a message of `size` bytes, once the rank has read one."""
        peer.outbox.want()
        self._until(peer, peer.outbox.has_room)
        slot = peer.outbox.take(size)
        assert slot is not None
        return slot

    def _until(self, peer: Peer, done: Callable[[], bool]) -> None:
        """Read frames of any rank until `done()`. Raises `PeerLost` if `peer` has ended, or is late."""
        began, seconds = time.monotonic(), _SLICE
        while not done():
            arrived, ended = peer.wait(seconds)
            if arrived:
                self._sort(self._inbox.read())
            else:
                seconds = self._patience(peer, ended, time.monotonic() - began)

    def _patience(self, peer: Peer, ended: bool, waited: float) -> float:
        """For how many more seconds to wait for a rank. Raises `PeerLost` if it is lost, or has time no longer."""
        group = self._group()
        if ended or group is None or not reaches(group, peer.rank):
            raise _closed(peer)
        limit = timeout_of(group).total_seconds()
        if waited >= limit:
            raise PeerLost(peer.rank, f"Timed out waiting {1e3 * limit:.0f}ms for rank {peer.rank} of the group")
        return min(max(waited, _SLICE), limit - waited)

    def _sort(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.channel == _READ:
                continue
            expected = self._expected[frame.source, frame.channel]
            if expected:
                self._read(frame, expected.popleft())
            else:
                self._early[frame.source, frame.channel].append(frame)

    def _read(self, frame: Frame, arrival: Arrival) -> None:
        """Copy a message out of its slot, and give the slot back."""
        peer, sizes = self._peers[arrival.peer], [tensor.nbytes for tensor in arrival.tensors]
        if sum(sizes) != frame.size:
            reason = f"rank {peer.rank} of the group sent {frame.size} bytes where {sum(sizes)} are expected"
            raise PeerLost(peer.rank, reason)
        try:
            slot = peer.mapped(frame)
        except RuntimeError:  # the process has ended, and its handles with it
            raise _closed(peer) from None
        at = slot.address
        for tensor, size in zip(arrival.tensors, sizes, strict=True):
            ctypes.memmove(tensor.data_ptr(), at, size)
            at += size
        arrival.tensors, arrival.there = (), True
        if slot.read(frame.order):
            with contextlib.suppress(BrokenPipeError):  # the rank has ended, after it sent the message
                peer.write(Frame(self.rank, _READ))


def _closed(peer: Peer) -> PeerLost:
    reason = f"Connection closed by peer: the process of rank {peer.rank} of the group has ended, or left the group"
    return PeerLost(peer.rank, reason)
