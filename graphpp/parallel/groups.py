"""graphpp's own process groups: their backends, timeouts, and whether a rank can be reached.

Contract: graphpp sends no message on a process group of the caller (the world, a mesh's, `dist.new_group`'s), where the order
of messages is the caller's, also in other threads. For each group of the caller, a set of ranks has one own group: all of them
make it at its first use, and all pipelines share it until the world group ends. gloo connects every pair of a group's ranks, so
own groups of GPUs have gloo for up to `MOST` ranks; more ranks agree in a `RankTree`. `Timeouts` gives own groups the timeout
of steps, and inside `starting` the timeout of the start, as long as a call runs; None: the timeout of the caller's group.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpp._torch import gloo_gathers as gloo_gathers  # changes operators of torch
from graphpp._torch.distributed import (
    Store,
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
_BETWEEN_PROBES = timedelta(seconds=5)
MOST = 64  # ranks of a group of GPUs that gloo connects too
_ON_GPUS = "cpu:gloo,cuda:nccl"
_LONGEST = 100  # characters
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
    """The own group of these world ranks, in this order. Called by all of them.

    `like`: a group of the caller, or an own one, with the same timeout and, but for gloo, the same backend. Raises `PeerLost`
    if a rank is lost, and `RuntimeError`.
    """
    callers = _CALLERS.get(like) or (like.group_name, timeout_of(like))
    name = f"graphpp {callers[0]} {_listed(ranks)}"
    found = open_groups().get(name) or _made(name, ranks, like, _backend(len(ranks), dist.get_backend(like)), callers[1])
    if _CALLERS.get(found, callers) != callers:
        set_timeout(found, callers[1])
    _CALLERS[found] = callers
    return found


def _backend(ranks: int, like: str) -> str:
    on_gpus = {"nccl", "cuda:nccl"}.intersection(like.split(","))
    return like if not on_gpus else _ON_GPUS if ranks <= MOST else "nccl"


def gloo_twin(
    ranks: Sequence[int], like: dist.ProcessGroup, timeout: float | None
) -> dist.ProcessGroup | None:
    """A gloo group of its own of these world ranks, for messages of a thread beside that of the calls; None for a single rank.

    All ranks make their twins in the same order. `like`: an own group of this rank. `timeout`: seconds; None: that of `like`.
    """
    if len(ranks) == 1:
        return None
    seconds, name = _CALLERS[like][1] if timeout is None else timedelta(seconds=timeout), f"graphpp twin {_listed(ranks)} "
    return _made(f"{name}{sum(each.startswith(name) for each in open_groups())}", ranks, like, "gloo", seconds)


def _listed(ranks: Sequence[int]) -> str:
    """The ranks in a name, which is part of every key of the store; a digest of many."""
    text = "_".join(map(str, ranks))
    return text if len(text) <= _LONGEST else f"{len(ranks)} ranks {hashlib.sha256(text.encode()).hexdigest()}"


def _made(name: str, ranks: Sequence[int], like: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    if backend == "fake":  # torch's group whose other ranks do not exist
        return group_of(name, ranks, backend, timeout, default_store())
    store = own_connection(default_store())  # the caller's thread may wait in the store
    _await(ranks, like, store, f"{name}/here", timeout)
    return group_of(name, ranks, backend, timeout, store)


def group_among(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """As `own_group`; None if this rank is alone or is not among the ranks."""
    return own_group(ranks, like) if len(ranks) > 1 and dist.get_rank() in ranks else None


def subgroup(ranks: Sequence[int], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The own group of some ranks of an own group; None if this rank is alone or is not among them."""
    return None if group is None else group_among([dist.get_global_rank(group, rank) for rank in ranks], group)


def _await(ranks: Sequence[int], like: dist.ProcessGroup, store: Store, name: str, timeout: timedelta) -> None:
    """Wait until all ranks are about to make a group, or raise; a lost rank is noticed over gloo.

    A rank calls the store three times, however many ranks there are, and more often only if one of them is late.
    """
    until = time.monotonic() + timeout.total_seconds()
    if store.add(f"{name}/{dist.get_rank()}", 1) == 1 and store.add(f"{name}/count", 1) == len(ranks):
        store.set(f"{name}/all", "")
    while not _is_set(store, f"{name}/all", min(_BETWEEN_PROBES, timeout)):
        for peer, rank in enumerate(dist.get_process_group_ranks(like) if has_gloo(like) else ()):
            if rank in ranks and rank != dist.get_rank() and not reaches(like, peer):  # gloo has no connection to itself
                raise PeerLost(None, "Connection closed by peer")
        if time.monotonic() > until:
            missing = next((rank for rank in ranks if not store.check([f"{name}/{rank}"])), None)
            raise RuntimeError(f"Timed out waiting for rank {missing} to make a process group")


def _is_set(store: Store, key: str, timeout: timedelta) -> bool:
    """Whether a key is set before the timeout. Raises `RuntimeError` if the store is lost."""
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        if "timeout" not in str(error).lower():
            raise
        return False
    return True


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
