"""Messages between the ranks of a process group: the protocol of a transport, and the choice of a group's transport.

Contract:
- `transport_of` returns shared memory (`same_host/`) if `connect` has found all ranks on one host and the tensors are on the
  CPU, else the group's own backend, gloo or NCCL. No other package distinguishes them.
- `connect` is called by all ranks of a group, any number of times. It finds shared memory on all of them or on none: on none
  for several hosts or users, containers that hide their processes, other systems than Linux, and groups without gloo.
- Both ranks of a pair post their messages in the same order. `PeerLost` names a rank that cannot be reached.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from graphpp.parallel.groups import has_gloo
from graphpp.parallel.same_host.memory import Inbox, Peer, Secret
from graphpp.parallel.same_host.messages import SameHost

_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, SameHost | None] = weakref.WeakKeyDictionary()
_ABLE = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


class Work(Protocol):
    """A message under way; implemented by `dist.Work`."""

    def is_completed(self) -> bool:
        """Whether the message is known to be sent or received; does not wait."""

    def wait(self) -> object:
        """Wait for the message; on CUDA the current stream waits."""


class Transport(Protocol):
    """Sends, receives and small collectives. `copies`: a send copies its tensors and is complete at once."""

    copies: bool

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post a send of tensors without gaps to a rank of the group."""

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        """Post a receive of the next message from a rank of the group into the tensors."""

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each number; called by all ranks, with equally many 64-bit integers."""

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Copy the values of the rank `source` to all ranks; called by all ranks, with equal shapes and dtypes."""

    def settle(self) -> None:
        """Wait until every message of this rank can be read, even if this process ends."""

    def drop(self) -> None:
        """Forget the receives of a failed step."""


class BackendTransport:
    """Messages over the group's backend, one call per tensor, as torch's pipeline runtime posts them."""

    copies = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        works = [dist.isend(tensor, group=self._group, group_dst=peer) for tensor in tensors]
        return [work for work in works if work is not None]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int) -> Sequence[Work]:
        works = [dist.irecv(tensor, group=self._group, group_src=peer) for tensor in tensors]
        return [work for work in works if work is not None]

    def largest(self, values: Sequence[int]) -> list[int]:
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        dist.broadcast(values, group=self._group, group_src=source)

    def settle(self) -> None:
        """Does nothing: the caller waits for the work of each send."""

    def drop(self) -> None:
        """Does nothing: the backend keeps the receives."""


def transport_of(group: dist.ProcessGroup | None, device: torch.device) -> Transport:
    shared = same_host(group) if device.type == "cpu" else None
    return BackendTransport(group, device) if shared is None else shared


def same_host(group: dist.ProcessGroup | None) -> SameHost | None:
    """This rank's shared-memory transport of a group; None unless `connect` found all ranks on one host."""
    return None if group is None else _KNOWN.get(group)


def connect(group: dist.ProcessGroup | None) -> None:
    """Find out whether the ranks of a group share this host, once per group."""
    if group is not None and group not in _KNOWN and has_gloo(group):
        _KNOWN[group] = _connected(group)


def _connected(group: dist.ProcessGroup) -> SameHost | None:
    inbox, secret = (Inbox(), Secret()) if _ABLE else (None, None)
    offer = [os.getpid(), inbox.writes, secret.handle, secret.word] if inbox is not None and secret is not None else [0] * 4
    offers = [torch.empty(4, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(offers, torch.tensor(offer, device="cpu"), group=group)
    peers = _reached([each.tolist() for each in offers], dist.get_rank(group), inbox) if inbox is not None else None
    found = torch.tensor([peers is not None], dtype=torch.int64, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return SameHost(group, inbox, peers) if inbox is not None and peers is not None and bool(found) else None


def _reached(offers: Sequence[Sequence[int]], rank: int, inbox: Inbox) -> dict[int, Peer] | None:
    """The other ranks' peers by rank; None if one of them cannot be reached."""
    found: dict[int, Peer] = {}
    try:
        for other, (process, pipe, handle, word) in enumerate(offers):
            if other != rank:
                if Secret.read(process, handle) != word:
                    return None
                found[other] = Peer(other, process, pipe, inbox)
    except OSError:
        return None
    return found
