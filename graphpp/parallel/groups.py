"""Process groups: subgroups, backends, whether a rank can be reached, timeouts.

Contract: making a process group is collective, so every rank asks a `Subgroups` for the same sets of ranks in the same order.
`Timeouts` gives a rank's groups the timeout of steps, and inside `starting` the timeout of the start; an option None means the
timeout that the group had before. A process group of the user keeps the timeout of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpp._torch import gloo_gathers as gloo_gathers  # changes operators of torch
from graphpp._torch.distributed import group_of, runs_on_gloo, set_timeout, timeout_of

_CPU = torch.device("cpu")
_TAG = 0x6C6F7374  # messages of a step have no tag, so that no receive matches a probe


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


def gloo_twin(group: dist.ProcessGroup | None, timeout: float | None) -> dist.ProcessGroup | None:
    """A gloo process group of the same ranks, for messages between threads that must not mix with messages of `group`.

    None for a single rank. Called by all ranks of the group. `timeout`: seconds; None: torch's default.
    """
    if group is None or dist.get_world_size(group) == 1:
        return None
    seconds = None if timeout is None else timedelta(seconds=timeout)
    return group_of(dist.get_process_group_ranks(group), "gloo", seconds)


class Subgroups:
    """Makes and keeps the process groups of subsets of a group's ranks. `timeout`: seconds; None: torch's default."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None = None) -> None:
        self._group = group
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self.rank = dist.get_rank(group) if group is not None else 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if ranks not in self._groups:
            self._groups[ranks] = self._new(ranks)
        return self._groups[ranks]

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if self._group is None or len(ranks) < 2:
            return None
        return group_of([dist.get_global_rank(self._group, rank) for rank in ranks], timeout=self._timeout)


class Timeouts:
    """Sets the seconds that a rank waits in a step, and while a call is compiled (`start`); None: the group's own timeout."""

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], step: float | None, start: float | None) -> None:
        given = step is not None or start is not None
        self._own = [(group, timeout_of(group)) for group in groups if group is not None] if given else []
        self._step, self._start = step, start
        self._set(step)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        self._set(self._start)
        try:
            yield
        finally:
            self._set(self._step)

    def _set(self, seconds: float | None) -> None:
        for group, own in self._own:
            set_timeout(group, own if seconds is None else timedelta(seconds=seconds))
