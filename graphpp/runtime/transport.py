"""Point-to-point messages: tensors to and from the ranks of the neighbouring stages.

Contract
--------
- Shape, strides and dtype of each tensor are known before the step (`TensorMeta`), so no message carries them. A receive buffer
  is allocated when its receive is posted.
- A tensor travels as its stored elements in memory order, and arrives with the strides with which the graph was captured,
  gaps and expanded dimensions included: a kernel computes the same bits from it as in one process. (Elements of overlapping
  windows are an exception: each travels once for every window that it is in.)
- Both ranks of a pair post their messages in the order of the action table, which is one total order of (send, receive) pairs.
  So two neighbours that send to each other cannot deadlock.
- A batch (P2P) is posted in one call. Each of its messages has handles of its own, or shares the batch's handle where the
  backend returns one for all (NCCL). On NCCL a batch uses another communicator than a single message, so with `batched=True`
  every message is posted as a batch, if only of one.
- At most `DEPTH` messages to one rank are in flight. A further send first waits for the oldest: an earlier event of the total
  order, so this wait cannot deadlock either. A sent tensor is released as soon as its send is known to be complete.
- Between ranks of one host (`parallel/same_host/`) a send copies its tensors and is complete at once. When a rank
  posts a receive or waits, it reads every message whose receive is posted. Up to `SLOTS` messages to one rank may be unread.
- On CUDA messages run on NCCL's streams: a posted send waits for the current stream's work so far, and `wait` makes the current
  stream wait, never the host. `Message.done` asks without waiting.
- A lost connection raises `PeerLost`, which names the peer.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from math import prod

import torch
import torch.distributed as dist

from graphpp._torch.symbols import hint
from graphpp.parallel.failure import PeerLost
from graphpp.parallel.groups import receives_overtake
from graphpp.parallel.same_host.connect import same_host
from graphpp.parallel.same_host.messages import Arrival, SameHost
from graphpp.runtime.program import TensorMeta
from graphpp.schedules.table.costs import DEPTH, MessageFlow


@dataclass
class Message:
    """A posted message. `works`: handles to wait for; `peer`: the other rank, within the group.

    `tensors`: the tensors that are sent, or that stay on this rank; `buffers`: where tensors from another rank arrive.
    """

    works: Sequence[dist.Work | Arrival]
    tensors: list[torch.Tensor]
    peer: int
    buffers: Sequence[ReceiveBuffer] = ()

    def done(self) -> bool:
        """Whether all tensors are known to be sent or received; does not wait."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they have arrived; on CUDA, the current stream waits for them. Raises `PeerLost`."""
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(self.peer, str(error)) from error
        return [buffer.value() for buffer in self.buffers] if self.buffers else self.tensors


@dataclass(frozen=True)
class PendingMessage:
    """A message that is not posted yet."""

    message: Message
    outgoing: bool = False

    @property
    def elements(self) -> list[torch.Tensor]:
        """The tensors on the wire: the memory that a send reads, or a receive writes."""
        return self.message.tensors if self.outgoing else [buffer.elements for buffer in self.message.buffers]


def message_flow(group: dist.ProcessGroup | None, device: torch.device) -> MessageFlow:
    """How early receives of a pipeline are posted, and how long its messages take memory.

    A send between ranks of one host copies its values and is complete. `group`: None where one process plans a table for
    several ranks, which then count as ranks of one host.
    """
    copies = device.type == "cpu" and (group is None or same_host(group) is not None)
    return MessageFlow(ahead=DEPTH if receives_overtake(group, device) else 0, kept=0 if copies else DEPTH)


class Transport:
    """Posts the messages of one pipeline over one process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, batched: bool = False) -> None:
        self._group, self.batched = group, batched
        self.device = device
        self._host = same_host(group) if device.type == "cpu" else None
        self._outgoing: dict[int, deque[Message]] = defaultdict(deque)
        self.waited = 0.0  # seconds that this process waited for messages
        self.on_wait: Callable[[], None] | None = None  # called before and after each wait, while a step is recorded

    def outgoing(self, values: Sequence[torch.Tensor], metas: Sequence[TensorMeta], peer: int) -> PendingMessage:
        """A message with these values for `peer`, packed; not posted yet."""
        packed = [pack(value, meta) for value, meta in zip(values, metas, strict=True)]
        return PendingMessage(Message([], packed, peer), outgoing=True)

    def incoming(self, metas: Sequence[TensorMeta], peer: int) -> PendingMessage:
        """A message from `peer` with newly allocated receive buffers; not posted yet."""
        return PendingMessage(Message([], [], peer, [ReceiveBuffer.of(meta, self.device) for meta in metas]))

    def start(self, messages: Sequence[PendingMessage]) -> None:
        """Post messages; the tensors of a send are held until it is complete.

        With `batched` all are posted in one call. Waits only where more than `DEPTH` messages to a rank would be in flight.
        """
        if self._host is not None:
            for pending in messages:
                post_on_host(pending, self._host)
            return
        sends = [pending.message for pending in messages if pending.outgoing]
        for peer, count in Counter([message.peer for message in sends]).items() if sends else ():
            self._make_room(peer, count)
        if self.batched:
            post_together(messages, self._group)
        else:
            for pending in messages:
                pending.message.works = post(pending, self._group)
        for message in sends:
            self._outgoing[message.peer].append(message)

    def _make_room(self, peer: int, count: int) -> None:
        """Wait for the oldest sends to `peer` until `count` more make at most `DEPTH`."""
        outgoing = self._outgoing[peer]
        while outgoing and (outgoing[0].done() or len(outgoing) + count > DEPTH):
            self.wait(outgoing.popleft())

    def wait(self, message: Message) -> list[torch.Tensor]:
        """The tensors of a message, once they have arrived; adds the time to `waited`."""
        on_wait = self.on_wait if message.works else None
        if on_wait is not None:
            on_wait()
        began = time.perf_counter()
        tensors = message.wait()
        self.waited += time.perf_counter() - began
        if on_wait is not None:
            on_wait()
        return tensors

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for outgoing in self._outgoing.values():
            while outgoing:
                self.wait(outgoing.popleft())
        if self._host is not None:
            self._host.settle()

    def drop(self) -> None:
        """Forget the messages in flight, after a failure."""
        self._outgoing.clear()
        if self._host is not None:
            self._host.drop()


def post(pending: PendingMessage, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Post a message as torch's runtime does, one call for each tensor, in order. Raises `PeerLost`."""
    peer = pending.message.peer
    try:
        if pending.outgoing:
            works = [dist.isend(value, group=group, group_dst=peer) for value in pending.elements]
        else:
            works = [dist.irecv(value, group=group, group_src=peer) for value in pending.elements]
    except RuntimeError as error:
        raise PeerLost(peer, str(error)) from error
    return [work for work in works if work is not None]


def post_on_host(pending: PendingMessage, host: SameHost) -> None:
    """Post a message to or from a rank of this host; a send has no handles, for its tensors are copied. Raises `PeerLost`."""
    peer = pending.message.peer
    try:
        if pending.outgoing:
            host.send(pending.elements, peer)
        else:
            pending.message.works = [host.receive(pending.elements, peer)]
    except RuntimeError as error:
        raise PeerLost(peer, str(error)) from error


def post_together(messages: Sequence[PendingMessage], group: dist.ProcessGroup | None) -> None:
    """Post all messages in one call and give each its handles. Raises `PeerLost`."""
    each = [[_operation(pending, value, group) for value in pending.elements] for pending in messages]
    ops = [op for own in each for op in own]
    peers = {pending.message.peer for pending, own in zip(messages, each, strict=True) if own}
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise PeerLost(peers.pop() if len(peers) == 1 else None, str(error)) from error
    handles = iter(works)
    for pending, own in zip(messages, each, strict=True):
        pending.message.works = list(islice(handles, len(own))) if len(works) == len(ops) else list(works)


def _operation(pending: PendingMessage, value: torch.Tensor, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend if pending.outgoing else dist.irecv, value, group=group, group_peer=pending.message.peer)


@dataclass(frozen=True)
class _Layout:
    """How the elements of a value lie in memory, and in which order they travel.

    `stored`: the shape, with 1 for each expanded dimension. `order`: the dimensions, largest stride first. `dense`: in that
    order the elements fill their memory without gaps, so they travel from and into the value's own memory. `plain`: dense, in
    the dimensions' usual order, and nothing expanded. `windows`: elements overlap, and travel one copy for each window.
    """

    stored: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]
    dense: bool
    plain: bool = False
    windows: bool = False

    @property
    def packed(self) -> list[int]:
        """The shape of the elements in a message."""
        return [self.stored[dim] for dim in self.order]


@lru_cache(maxsize=2**14)
def _layout(meta: TensorMeta) -> _Layout:
    pairs = list(zip(meta.shape, meta.stride, strict=True))
    stored = tuple(min(size, 1) if stride == 0 else size for size, stride in pairs)
    order = tuple(sorted(range(len(pairs)), key=lambda dim: (-meta.stride[dim], -stored[dim], dim)))
    dense, extent = True, 1
    for dim in reversed(order):
        if stored[dim] > 1:
            if meta.stride[dim] < extent:  # overlapping elements
                return _Layout(meta.shape, meta.stride, tuple(range(len(pairs))), dense=False, windows=True)
            dense = dense and meta.stride[dim] == extent
            extent = meta.stride[dim] * (stored[dim] - 1) + extent
    plain = dense and stored == meta.shape and order == tuple(range(len(pairs)))
    return _Layout(stored, meta.stride, order, dense, plain)


def pack(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The stored elements of `value` for a message: a view, or a copy where `value` has gaps or other strides than `meta`."""
    layout = _layout(meta)
    value = value.resolve_conj().resolve_neg()
    if layout.plain:
        return value.contiguous()
    for dim, size in enumerate(layout.stored):
        if size != meta.shape[dim]:
            value = value.narrow(dim, 0, size)
    return value.permute(layout.order).contiguous()


@dataclass(frozen=True)
class ReceiveBuffer:
    """Memory in which a value of `shape` arrives: the message writes `elements`; `strided` has the captured strides."""

    elements: torch.Tensor
    strided: torch.Tensor
    shape: tuple[int, ...]
    layout: _Layout

    @classmethod
    def of(cls, meta: TensorMeta, device: torch.device) -> ReceiveBuffer:
        """New memory for one value."""
        layout = _layout(meta)
        strided = torch.empty_strided(layout.stored, layout.stride, dtype=meta.dtype, device=device)
        if layout.plain:
            return cls(strided, strided, meta.shape, layout)
        if layout.dense:
            return cls(strided.permute(layout.order), strided, meta.shape, layout)
        return cls(torch.empty(layout.packed, dtype=meta.dtype, device=device), strided, meta.shape, layout)

    @staticmethod
    def nbytes(meta: TensorMeta) -> int:
        """The bytes that the memory of a value takes until the value is read: gaps, and a packed copy where there are any."""
        known = replace(meta, shape=tuple(map(hint, meta.shape)), stride=tuple(map(hint, meta.stride)))
        layout = _layout(known)
        sizes = zip(layout.stored, layout.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in sizes) if all(layout.stored) else 0
        packed = 0 if layout.dense else prod(layout.packed)
        return (span + packed) * known.dtype.itemsize

    def value(self) -> torch.Tensor:
        """The value, once its elements have arrived."""
        if self.layout.windows:
            _write_windows(self.strided, self.elements)
        elif not self.layout.dense:
            self.strided.permute(self.layout.order).copy_(self.elements)
        return self.strided if self.layout.stored == self.shape else self.strided.expand(self.shape)


def _write_windows(strided: torch.Tensor, elements: torch.Tensor) -> None:
    """Write elements into overlapping windows; elements that share memory have the same value."""
    flat = strided.as_strided((strided.untyped_storage().nbytes() // strided.element_size(),), (1,))
    index = torch.arange(len(flat), device=strided.device).as_strided(strided.shape, strided.stride())
    flat.index_copy_(0, index.reshape(-1), elements.reshape(-1))
