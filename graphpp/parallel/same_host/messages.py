"""`SameHost`: sends, receives and small collectives between the ranks of a group on one host.

Contract:
- A message's tensors fill their memory without gaps. The receiver knows the size, and both ranks of a pair post their messages
  in the same order, separately for each channel.
- `send` copies the tensors, and returns at once unless `SLOTS` messages to that rank are unread; then it waits for the oldest.
  A rank reads every message with a posted receive whenever it posts a receive or waits for anything. So `send` ends where a
  wait for a gloo send would end, and a rank that computes without waiting still frees slots.
- After `settle` every message of this rank can be read, even if this process ends.
- `PeerLost`, with gloo's words, is raised for a rank whose process has ended or whose group is destroyed, and for a rank
  that sends nothing within the timeout of the group.
- A `SameHost` belongs to one thread. It does not keep its process group alive.
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

STEP, CONTROL = 0, 1  # channels: messages of a step's table; collectives before and after it
_READ = 2  # in place of a channel: tells a waiting sender that its message was read
_SLICE = 0.25  # seconds until a waiting rank first checks its connection to the peer


class Arrival:
    """A posted receive, with the methods of `dist.Work` that a transport calls."""

    def __init__(self, host: SameHost, tensors: Sequence[torch.Tensor], peer: int) -> None:
        self._host, self.tensors, self.peer, self.there = host, tensors, peer, False

    def is_completed(self) -> bool:
        if not self.there:
            self._host.poll()
        return self.there

    def wait(self) -> None:
        """Raises `PeerLost`."""
        if not self.there:
            self._host.until(self)


class SameHost:
    """A `Transport` (`transport.py`) of this rank."""

    copies = True

    def __init__(self, group: dist.ProcessGroup, inbox: Inbox, peers: Mapping[int, Peer]) -> None:
        self.rank = dist.get_rank(group)
        self._group, self._inbox, self._peers = weakref.ref(group), inbox, peers
        self._expected: dict[tuple[int, int], deque[Arrival]] = defaultdict(deque)  # by rank and channel
        self._early: dict[tuple[int, int], deque[Frame]] = defaultdict(deque)  # messages without a posted receive

    def send(self, tensors: Sequence[torch.Tensor], peer: int, channel: int = STEP) -> Sequence[Arrival]:
        """Send tensors to a rank of the group; complete on return. Raises `PeerLost`."""
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
        return (self.expect(tensors, peer),)

    def expect(self, tensors: Sequence[torch.Tensor], peer: int, channel: int = STEP) -> Arrival:
        """Post a receive of the channel's next message from a rank of the group into the tensors."""
        arrival, early = Arrival(self, tensors, peer), self._early[peer, channel]
        if early:
            self._read(early.popleft(), arrival)
        else:
            self._expected[peer, channel].append(arrival)
        self.poll()
        return arrival

    def settle(self) -> None:
        """Wait until the other ranks have mapped all memory with messages of this rank. Raises `PeerLost`."""
        for peer in self._peers.values():
            if not peer.outbox.is_settled():
                peer.outbox.want()
                self._until(peer, peer.outbox.is_settled)
            peer.outbox.close_handles()

    def drop(self) -> None:
        for (_, channel), arrivals in self._expected.items():
            if channel == STEP:
                arrivals.clear()

    def largest(self, values: Sequence[int]) -> list[int]:
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
        if self.rank == source:
            self._send_to_all(values)
            self.settle()
        else:
            self.expect([values], source, CONTROL).wait()

    def until(self, arrival: Arrival) -> None:
        self._until(self._peers[arrival.peer], lambda: arrival.there)

    def poll(self) -> None:
        while self._inbox.ready():
            self._sort(self._inbox.read())

    def _send_to_all(self, values: torch.Tensor) -> None:
        for peer in self._peers:
            self.send([values], peer, CONTROL)

    def _freed(self, peer: Peer, size: int) -> Slot:
        """A slot for a message of `size` bytes; waits until the peer has read one."""
        peer.outbox.want()
        self._until(peer, peer.outbox.has_room)
        slot = peer.outbox.take(size)
        assert slot is not None
        return slot

    def _until(self, peer: Peer, done: Callable[[], bool]) -> None:
        """Read frames of any rank until `done()`. Raises `PeerLost` if `peer` has ended or the timeout is over."""
        began, seconds = time.monotonic(), _SLICE
        while not done():
            arrived, ended = peer.wait(seconds)
            if arrived:
                self._sort(self._inbox.read())
            else:
                seconds = self._patience(peer, ended, time.monotonic() - began)

    def _patience(self, peer: Peer, ended: bool, waited: float) -> float:
        """How many more seconds to wait for a rank. Raises `PeerLost` if it is lost, or the timeout is over."""
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
        peer, sizes = self._peers[arrival.peer], [tensor.nbytes for tensor in arrival.tensors]
        if sum(sizes) != frame.size:
            reason = f"rank {peer.rank} of the group sent {frame.size} bytes where {sum(sizes)} are expected"
            raise PeerLost(peer.rank, reason)
        try:
            slot = peer.mapped(frame)
        except RuntimeError:  # the process has ended, which closed its handles
            raise _closed(peer) from None
        at = slot.address
        for tensor, size in zip(arrival.tensors, sizes, strict=True):
            ctypes.memmove(tensor.data_ptr(), at, size)
            at += size
        arrival.tensors, arrival.there = (), True
        if slot.read(frame.order):
            with contextlib.suppress(BrokenPipeError):  # the sender has ended
                peer.write(Frame(self.rank, _READ))


def _closed(peer: Peer) -> PeerLost:
    reason = f"Connection closed by peer: the process of rank {peer.rank} of the group has ended, or left the group"
    return PeerLost(peer.rank, reason)
