"""Messages between the ranks of a process group: the form of a transport, and which one a group has.

Contract
--------
- `transport_of` gives the transport of a group for tensors of a device: shared memory (`same_host/`) where `connect` has found
  all ranks on one host and the tensors are on the CPU, else the group's own backend, gloo or NCCL. No other package asks which.
- Both ranks of a pair post their messages in one order. `PeerLost` names a rank that cannot be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from graphpp.parallel.same_host.connect import connect as connect
from graphpp.parallel.same_host.connect import same_host


class Work(Protocol):
    """A message under way, as a `dist.Work`."""

    def is_completed(self) -> bool:
        """Whether the message is known to be sent or received; does not wait."""

    def wait(self) -> object:
        """Wait for the message; on CUDA the current stream waits."""


class Transport(Protocol):
    """Sends, receives, and the small exchanges of all ranks. `copies`: a send copies its tensors and is complete at once."""

    copies: bool

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post tensors without gaps for a rank of the group."""

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post a receive: the next message from a rank of the group is written into the tensors."""

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest value of each number over all ranks; called by all of them, with as many integers of 64 bits."""

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Write the values of the rank `source` into those of all ranks; called by all of them, with one shape and dtype."""

    def settle(self) -> None:
        """Wait until every message of this rank can be read, also if this process ends."""

    def drop(self) -> None:
        """Forget the receives of a step that failed."""


class BackendTransport:
    """Messages over the group's backend, one call for each tensor, as torch's pipeline runtime posts them."""

    copies = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post a send of each tensor."""
        works = [dist.isend(tensor, group=self._group, group_dst=peer) for tensor in tensors]
        return [work for work in works if work is not None]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post a receive of each tensor."""
        works = [dist.irecv(tensor, group=self._group, group_src=peer) for tensor in tensors]
        return [work for work in works if work is not None]

    def largest(self, values: Sequence[int]) -> list[int]:
        """An all-reduce on the device."""
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """The backend's broadcast."""
        dist.broadcast(values, group=self._group, group_src=source)

    def settle(self) -> None:
        """Nothing: each send has a work of its own to wait for."""

    def drop(self) -> None:
        """Nothing: the backend has the receives."""


def transport_of(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    """The transport of a group for tensors on a device."""
    shared = same_host(group) if device.type == "cpu" else None
    return BackendTransport(group, device) if shared is None else shared
