"""Point-to-point: tensors to and from the neighbouring stages' ranks.

Contract
--------
- What crosses is known beforehand: `TensorMeta` per value. A receive buffer is made when the receive is posted.
- A tensor's elements travel once, in their memory order, and arrive with the strides the graph was captured with, gaps
  and repetitions included: a kernel that reads them goes the same way as in one process. (Only elements that lie over
  each other, as windows do, travel as often as they are seen.)
- Messages of one pair of ranks are posted on both sides in the order of the action table, which is one total order of
  (send, receive) pairs: two neighbours that send to each other cannot wait for each other.
- A batch (P2P) is posted in one call; its messages have a handle each, or share the batch's where the backend has one
  for all (NCCL). On NCCL a batch goes another way than a message posted alone, so with `batched` every message goes as a
  batch, if only of one.
- At most `DEPTH` messages to one rank are outstanding; a further one first waits for the oldest (a wait for an earlier
  event of the total order, so it cannot hang). A sent tensor is released as soon as its send is known to be complete.
- On CUDA messages run on NCCL's streams: a post lets them wait for what the current stream has made, and waiting for a
  message makes the current stream wait, never the host. `done` only asks.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch
import torch.distributed as dist

from graphpp.parallel.failure import PeerLost
from graphpp.runtime.program import TensorMeta

DEPTH = 2


@dataclass
class Message:
    """Tensors under way, with the works to wait for, and the rank (of the group) at the other end.

    What was received over a process group is in `landings`; what goes out, or stays on this rank, in `tensors`.
    """

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    peer: int
    landings: Sequence[Landing] = ()

    def done(self) -> bool:
        """Whether every part is known to have gone out, without waiting."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they have arrived (on CUDA: once the current stream will see them)."""
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(self.peer, str(error)) from error
        return [landing.value() for landing in self.landings] if self.landings else self.tensors


@dataclass(frozen=True)
class Parcel:
    """A message that is not posted yet."""

    message: Message
    outgoing: bool = False

    @property
    def elements(self) -> list[torch.Tensor]:
        """What goes over the wire: the memory that is read, or written into."""
        return self.message.tensors if self.outgoing else [landing.elements for landing in self.message.landings]


class Transport:
    """Posts the messages of one pipeline over one process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, batched: bool = False) -> None:
        self._group, self.batched = group, batched
        self.device = device
        self._outgoing: dict[int, deque[Message]] = defaultdict(deque)
        self.waited = 0.0  # seconds that this process stood still for messages
        self.on_wait: Callable[[], None] | None = None  # called before and after each wait, while a step is recorded

    def outgoing(self, values: Sequence[torch.Tensor], metas: Sequence[TensorMeta], peer: int) -> Parcel:
        """What `peer` is to be sent, packed; nothing is posted yet."""
        packed = [pack(value, meta) for value, meta in zip(values, metas, strict=True)]
        return Parcel(Message([], packed, peer), outgoing=True)

    def incoming(self, metas: Sequence[TensorMeta], peer: int) -> Parcel:
        """Memory for what `peer` will send; nothing is posted yet."""
        return Parcel(Message([], [], peer, [Landing.of(meta, self.device) for meta in metas]))

    def start(self, parcels: Sequence[Parcel]) -> None:
        """Start sending and receiving: each message gets its handles, and what is sent is held until it has gone out.

        With `batched` all is posted in one call. Waits only where more than `DEPTH` messages to a rank would be out.
        """
        sends = [parcel.message for parcel in parcels if parcel.outgoing]
        for peer, count in Counter([message.peer for message in sends]).items() if sends else ():
            self._make_room(peer, count)
        if self.batched:
            post_together(parcels, self._group)
        else:
            for parcel in parcels:
                parcel.message.works = post(parcel, self._group)
        for message in sends:
            self._outgoing[message.peer].append(message)

    def _make_room(self, peer: int, count: int) -> None:
        """Wait for the oldest messages to `peer` until `count` more are at most `DEPTH`."""
        outgoing = self._outgoing[peer]
        while outgoing and (outgoing[0].done() or len(outgoing) + count > DEPTH):
            self.wait(outgoing.popleft())

    def wait(self, message: Message) -> list[torch.Tensor]:
        """The tensors of a message, once they are there; counts the time."""
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
        """Wait until everything sent has gone out."""
        for outgoing in self._outgoing.values():
            while outgoing:
                self.wait(outgoing.popleft())

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        self._outgoing.clear()


def post(parcel: Parcel, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Post a message, as torch's runtime does: one call for each tensor, in order."""
    peer = parcel.message.peer
    try:
        if parcel.outgoing:
            works = [dist.isend(value, group=group, group_dst=peer) for value in parcel.elements]
        else:
            works = [dist.irecv(value, group=group, group_src=peer) for value in parcel.elements]
    except RuntimeError as error:
        raise PeerLost(peer, str(error)) from error
    return [work for work in works if work is not None]


def post_together(parcels: Sequence[Parcel], group: dist.ProcessGroup | None) -> None:
    """Post all messages in one call and give each its handles."""
    each = [[_operation(parcel, value, group) for value in parcel.elements] for parcel in parcels]
    ops = [op for own in each for op in own]
    peers = {parcel.message.peer for parcel, own in zip(parcels, each, strict=True) if own}
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise PeerLost(peers.pop() if len(peers) == 1 else None, str(error)) from error
    handles = iter(works)
    for parcel, own in zip(parcels, each, strict=True):
        parcel.message.works = list(islice(handles, len(own))) if len(works) == len(ops) else list(works)


def _operation(parcel: Parcel, value: torch.Tensor, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend if parcel.outgoing else dist.irecv, value, group=group, group_peer=parcel.message.peer)


@dataclass(frozen=True)
class _Layout:
    """How the elements of a value lie in memory, and how they travel.

    `stored`: the shape without what `expand` only repeats. `order`: the dimensions, slowest first. `dense`: in that
    order the elements fill their memory without gaps, so that they travel from and into their place. `plain`: they
    travel as they are. `windows`: they lie over each other, and are taken apart to travel.
    """

    stored: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]
    dense: bool
    plain: bool = False
    windows: bool = False

    @property
    def packed(self) -> list[int]:
        """The shape of the elements as they travel."""
        return [self.stored[dim] for dim in self.order]


@cache
def _layout(meta: TensorMeta) -> _Layout:
    pairs = list(zip(meta.shape, meta.stride, strict=True))
    stored = tuple(min(size, 1) if stride == 0 else size for size, stride in pairs)
    order = tuple(sorted(range(len(pairs)), key=lambda dim: (-meta.stride[dim], -stored[dim], dim)))
    dense, extent = True, 1
    for dim in reversed(order):
        if stored[dim] > 1:
            if meta.stride[dim] < extent:  # elements that lie over each other
                return _Layout(meta.shape, meta.stride, tuple(range(len(pairs))), dense=False, windows=True)
            dense = dense and meta.stride[dim] == extent
            extent = meta.stride[dim] * (stored[dim] - 1) + extent
    plain = dense and stored == meta.shape and order == tuple(range(len(pairs)))
    return _Layout(stored, meta.stride, order, dense, plain)


def pack(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The elements of `value` as they travel: a view of it; a copy if it has gaps or lies otherwise than captured."""
    layout = _layout(meta)
    value = value.resolve_conj().resolve_neg()
    if layout.plain:
        return value.contiguous()
    for dim, size in enumerate(layout.stored):
        if size != meta.shape[dim]:
            value = value.narrow(dim, 0, size)
    return value.permute(layout.order).contiguous()


@dataclass(frozen=True)
class Landing:
    """Where a value of `shape` arrives: `elements` are received, `place` has the captured strides."""

    elements: torch.Tensor
    place: torch.Tensor
    shape: tuple[int, ...]
    layout: _Layout

    @classmethod
    def of(cls, meta: TensorMeta, device: torch.device) -> Landing:
        """Memory for one value."""
        layout = _layout(meta)
        place = torch.empty_strided(layout.stored, layout.stride, dtype=meta.dtype, device=device)
        if layout.plain:
            return cls(place, place, meta.shape, layout)
        if layout.dense:
            return cls(place.permute(layout.order), place, meta.shape, layout)
        return cls(torch.empty(layout.packed, dtype=meta.dtype, device=device), place, meta.shape, layout)

    def value(self) -> torch.Tensor:
        """The value, once its elements have arrived."""
        if self.layout.windows:
            _lay_over(self.place, self.elements)
        elif not self.layout.dense:
            self.place.permute(self.layout.order).copy_(self.elements)
        return self.place if self.layout.stored == self.shape else self.place.expand(self.shape)


def _lay_over(place: torch.Tensor, elements: torch.Tensor) -> None:
    """Write elements into windows; those that come to lie over each other are the same."""
    flat = place.as_strided((place.untyped_storage().nbytes() // place.element_size(),), (1,))
    index = torch.arange(len(flat), device=place.device).as_strided(place.shape, place.stride())
    flat.index_copy_(0, index.reshape(-1), elements.reshape(-1))
