"""graphpp's own process groups: their backends, timeouts, and whether a rank can be reached.

Contract: graphpp sends no message on a process group of the caller (the world, a mesh's, `dist.new_group`'s), where the order
of messages is the caller's, also in other threads. For each group of the caller, a set of ranks has one own group: all of them
make it at its first use, and all pipelines share it until the world group ends. `Timeouts` gives own groups the timeout of
steps, and inside `starting` the timeout of the start, as long as a call runs; None: the timeout of the caller's group.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpp._torch import gloo_gathers as gloo_gathers  # changes operators of torch
from graphpp._torch.distributed import (
    default_store,
    group_of,
    open_groups,
    own_connection,
    runs_on_gloo,
    set_timeout,
    timeout_of,
)

_CPU = torch.device("cpu")
_TAG = 0x6C6F7374  # messages of a step have no tag, so that no receive matches a probe
_BETWEEN_PROBES = 5.0  # seconds
# a shared own group -> the name and the timeout of the caller's group
_CALLERS = weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, timedelta]]()


def has_gloo(group: dist.ProcessGroup) -> bool:
    return runs_on_gloo(group, _CPU)


def receives_overtake(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether an early posted receive of tensors on the device delays no message posted later.

    Gloo matches each message with its receive; NCCL runs the messages of a communicator one after another. A fake group of
    torch, which plans for absent ranks, counts as gloo.
    """
    if device.type != "cpu" or group is None:
        return device.type == "cpu"
    return has_gloo(group) or "cpu:fake" in dist.get_backend_config(group)


def reaches(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the connection to a rank of a gloo group is open; the rank itself may be stopped or busy."""
    try:
        dist.isend(torch.zeros(1, device="cpu"), group=group, group_dst=rank, tag=_TAG)
    except RuntimeError:
        return False
    return True


class PeerLost(RuntimeError):  # noqa: N818 - it names an event
    """A message to or from `peer` (rank of the group; None: one of several) could not be completed."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


def own_group(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """The own group of these world ranks, in this order, with the backend and timeout of `like`. Called by all of them.

    `like`: a group of the caller, or an own one. Raises `PeerLost` if a rank is lost, and `RuntimeError`.
    """
    callers = _CALLERS.get(like) or (like.group_name, timeout_of(like))
    name = f"graphpp {callers[0]} {'_'.join(map(str, ranks))}"
    found = open_groups().get(name) or _made(name, ranks, like, dist.get_backend(like), callers[1])
    if _CALLERS.get(found, callers) != callers:
        set_timeout(found, callers[1])
    _CALLERS[found] = callers
    return found


def gloo_twin(group: dist.ProcessGroup | None, timeout: float | None) -> dist.ProcessGroup | None:
    """Another gloo group of the same ranks, for messages of a thread beside that of the calls; None for a single rank.

    All ranks make their twins in the same order. `timeout`: seconds; None: that of `group`.
    """
    if group is None:
        return None
    ranks, seconds = dist.get_process_group_ranks(group), _CALLERS[group][1] if timeout is None else timedelta(seconds=timeout)
    name = f"graphpp twin {'_'.join(map(str, ranks))} "
    return _made(f"{name}{sum(each.startswith(name) for each in open_groups())}", ranks, group, "gloo", seconds)


def _made(name: str, ranks: Sequence[int], like: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    if backend == "fake":  # torch's group whose other ranks do not exist
        return group_of(name, ranks, backend, timeout, default_store())
    _await(ranks, like, f"{name}/here", timeout)
    return group_of(name, ranks, backend, timeout, own_connection(default_store()))  # the caller's thread may wait in the store


def group_among(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """As `own_group`; None if this rank is alone or is not among the ranks."""
    return own_group(ranks, like) if len(ranks) > 1 and dist.get_rank() in ranks else None


def subgroup(ranks: Sequence[int], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The own group of some ranks of an own group; None if this rank is alone or is not among them."""
    return None if group is None else group_among([dist.get_global_rank(group, rank) for rank in ranks], group)


def _await(ranks: Sequence[int], like: dist.ProcessGroup, name: str, timeout: timedelta) -> None:
    """Wait until all ranks are about to make a group, or raise; a lost rank is noticed over gloo."""
    store, keys = default_store(), {f"{name}/{rank}": rank for rank in ranks}
    store.set(f"{name}/{dist.get_rank()}", "")
    began = probed = time.monotonic()
    pause = 0.001  # seconds; longer and longer, for the store serves all ranks
    while missing := [rank for key, rank in keys.items() if not store.check([key])]:
        now = time.monotonic()
        if now - began > timeout.total_seconds():
            raise RuntimeError(f"Timed out waiting for rank {missing[0]} to make a process group")
        if now - probed > _BETWEEN_PROBES and has_gloo(like):
            probed = now
            for peer in (dist.get_group_rank(like, rank) for rank in missing):
                if not reaches(like, peer):
                    raise PeerLost(peer, "Connection closed by peer")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        keys = {key: rank for key, rank in keys.items() if rank in missing}


class Timeouts:
    """The seconds that a rank waits in a pipeline's calls (`step`), and while a call is compiled (`start`)."""

    def __init__(self, step: float | None, start: float | None) -> None:
        self._step, self._start = step, start
        self._now: float | None = None

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        return self._waiting(self._step)

    def starting(self) -> contextlib.AbstractContextManager[None]:
        return self._waiting(self._start)

    @contextlib.contextmanager
    def _waiting(self, seconds: float | None) -> Iterator[None]:
        before = self._now
        self._set(seconds)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, seconds: float | None) -> None:
        if seconds != self._now:
            for group in open_groups().values():
                if group in _CALLERS:
                    set_timeout(group, _CALLERS[group][1] if seconds is None else timedelta(seconds=seconds))
        self._now = seconds
