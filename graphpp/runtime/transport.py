"""Point-to-point: tensors to and from the neighbouring stages' ranks.

Contract
--------
- What crosses is known beforehand: `TensorMeta` per value. A receive buffer is made when the receive is posted.
- A dense tensor travels in its memory order, so it arrives with the strides the graph was captured with.
- Messages of one pair of ranks are posted on both sides in the order of the action table, which is one total order of
  (send, receive) pairs: two neighbours that send to each other cannot wait for each other.
- At most `DEPTH` messages to one rank are outstanding; a further one first waits for the oldest (a wait for an earlier
  event of the total order, so it cannot hang). A sent tensor is released as soon as its send is known to be complete.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphpp.runtime.program import TensorMeta

DEPTH = 2


@dataclass
class Message:
    """Tensors under way, with the works to wait for, and the rank (of the group) at the other end."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    peer: int

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
        return self.tensors


class PeerLost(RuntimeError):
    """A message to or from `peer` (rank of the group) could not be completed."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transport:
    """Posts the messages of one pipeline over one process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._outgoing: dict[int, deque[Message]] = defaultdict(deque)

    def send_ops(self, values: Sequence[torch.Tensor], metas: Sequence[TensorMeta], peer: int) -> list[dist.P2POp]:
        """The operations that send `values` to `peer`."""
        ready = [in_memory_order(as_captured(value, meta), meta) for value, meta in zip(values, metas, strict=True)]
        return [dist.P2POp(dist.isend, value, group=self._group, group_peer=peer) for value in ready]

    def receive_ops(self, buffers: Sequence[torch.Tensor], metas: Sequence[TensorMeta], peer: int) -> list[dist.P2POp]:
        """The operations that receive into `buffers` from `peer`."""
        ordered = [in_memory_order(buffer, meta) for buffer, meta in zip(buffers, metas, strict=True)]
        return [dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer) for buffer in ordered]

    def buffers(self, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
        """Empty tensors as captured, to receive into."""
        return [torch.empty_strided(m.shape, _stride(m), dtype=m.dtype, device=self._device) for m in metas]

    def post_send(self, ops: list[dist.P2POp], peer: int) -> None:
        """Start sending; the tensors are held until they have gone out."""
        outgoing = self._outgoing[peer]
        while outgoing and (outgoing[0].done() or len(outgoing) >= DEPTH):
            outgoing.popleft().wait()
        outgoing.append(Message(post(ops, peer), [op.tensor for op in ops], peer))

    def flush(self) -> None:
        """Wait until everything sent has gone out."""
        for outgoing in self._outgoing.values():
            while outgoing:
                outgoing.popleft().wait()

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        self._outgoing.clear()


def post(ops: list[dist.P2POp], peer: int) -> list[dist.Work]:
    """Post a batch of one direction to one peer, as torch's runtime does: one call each, in order."""
    try:
        if not ops:
            return []
        if ops[0].op is dist.isend:
            works = [dist.isend(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops]
        else:
            works = [dist.irecv(op.tensor, group=op.group, group_src=op.group_peer) for op in ops]
    except RuntimeError as error:
        raise PeerLost(peer, str(error)) from error
    return [work for work in works if work is not None]


def _dense(meta: TensorMeta) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for dim in _memory_order(meta):
        if meta.shape[dim] != 1 and meta.stride[dim] != expected:
            return False
        expected *= meta.shape[dim]
    return True


def _memory_order(meta: TensorMeta) -> list[int]:
    """Dimensions from the fastest to the slowest."""
    return sorted(range(len(meta.shape)), key=lambda dim: (meta.stride[dim], meta.shape[dim], -dim))


def _stride(meta: TensorMeta) -> tuple[int, ...]:
    """The captured strides where the tensor is dense, else those of a contiguous one."""
    if _dense(meta):
        return meta.stride
    strides, step = [], 1
    for size in reversed(meta.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def as_captured(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`value` with the strides of the capture; a copy only where a kernel returned others, or the capture had gaps."""
    stride = _stride(meta)
    if value.stride() == stride:
        return value
    copy = torch.empty_strided(meta.shape, stride, dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def in_memory_order(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A contiguous view of a dense tensor."""
    if value.is_contiguous():
        return value
    return value.permute(list(reversed(_memory_order(meta))))
