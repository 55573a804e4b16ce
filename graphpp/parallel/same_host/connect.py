"""Find out whether the ranks of a process group are on one host, and see each other's processes.

Contract: `connect` is called by all ranks of a group, any number of times. Afterwards `same_host(group)` is a `SameHost` on all
of them, or None on all of them: ranks on several hosts, in containers that hide their processes from each other, of several
users, on another system than Linux, or without gloo.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphpp.parallel.groups import has_gloo
from graphpp.parallel.same_host.memory import Inbox, Peer, Secret
from graphpp.parallel.same_host.messages import SameHost

_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, SameHost | None] = weakref.WeakKeyDictionary()
_ABLE = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


def same_host(group: dist.ProcessGroup | None) -> SameHost | None:
    """This rank's messages within a group whose ranks were found on one host by `connect`."""
    return None if group is None else _KNOWN.get(group)


def connect(group: dist.ProcessGroup | None) -> None:
    """Look for the other ranks of a group on this host, if nobody has done so."""
    if group is not None and group not in _KNOWN and dist.get_world_size(group) > 1 and has_gloo(group):
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
    """The other ranks by their numbers; None if one of them cannot be reached."""
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
