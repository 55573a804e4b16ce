"""An all-to-all over gloo that takes the time of a network, and records the times of each transfer.

Contract: `emulated(latency, bandwidth)` is a process group over all ranks. Its `all_to_all_single` moves the values with gloo
and completes no sooner than a link with that latency (seconds) and bandwidth (bytes per second) would: one transfer at a time,
without occupying a processor. Latency 0 and bandwidth 0 leave gloo as it is. `transfers()` returns the records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class Transfer:
    """The clock of one collective: issued, on the link, due (None: gloo as it is), arrived, awaited, over."""

    issued: float
    begun: float
    due: float | None
    there: float = 0.0
    asked: float = 0.0
    over: float = 0.0

    @property
    def seconds(self) -> float:
        """The time on the network; of gloo as it is, until the values had arrived."""
        return self.end - self.begun

    @property
    def end(self) -> float:
        """The clock when the network was done."""
        return self.there if self.due is None else self.due

    @property
    def blocked(self) -> float:
        """The part of `seconds` during which `wait` blocked."""
        return max(0.0, min(self.over, self.end) - self.asked)

    @property
    def late(self) -> float:
        """The time for which `wait` blocked after `end`: the other rank had not issued its collective yet."""
        return max(0.0, self.over - max(self.asked, self.end))


class _Pending(dist.Work):
    """A transfer in flight."""

    def __init__(self, inner: dist.Work, transfer: Transfer, kept: set[_Pending]) -> None:
        super().__init__()
        self._inner, self._transfer, self._kept = inner, transfer, kept
        kept.add(self)  # torch's registry keeps only the C++ half of the object alive
        inner.get_future().add_done_callback(self._arrived)

    def _arrived(self, future: Any) -> None:
        self._transfer.there = time.perf_counter()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the transfer is done."""
        self._transfer.asked = time.perf_counter()
        self._inner.wait()
        if self._transfer.due is not None:
            time.sleep(max(0.0, self._transfer.due - time.perf_counter()))
        self._transfer.over = time.perf_counter()
        self._kept.discard(self)
        return True


class _Network(dist.ProcessGroup):
    """Gloo, slowed down."""

    latency = bandwidth = 0.0

    def __init__(self, inner: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner, self.transfers = inner, list[Transfer]()
        self._free = 0.0  # the clock when the link becomes free
        self._pending: set[_Pending] = set()

    def alltoall_base(self, output: Tensor, given: Tensor, out: list[int], into: list[int], options: Any = None) -> dist.Work:
        now = time.perf_counter()
        takes = self.latency + (given.nbytes / self.bandwidth if self.bandwidth else 0.0)
        begun = max(now, self._free) if takes else now
        self._free = begun + takes
        self.transfers.append(Transfer(now, begun, self._free if takes else None))
        work = self.inner.alltoall_base(output, given, out, into, dist.AllToAllOptions())
        return _Pending(work, self.transfers[-1], self._pending)

    def allgather(self, output: list[list[Tensor]], given: list[Tensor], options: Any = None) -> dist.Work:
        return self.inner.allgather(output, given)

    def allreduce(self, given: list[Tensor], options: Any = None) -> dist.Work:
        """Used by the ranks to agree, before a step."""
        return self.inner.allreduce(given, options)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name that torch gave; torch would look for the name on a backend."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "network"


_made: list[_Network] = []
_emulated: list[_Network] = []  # graphpp may make further groups of this backend


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> _Network:
    inner = dist.new_group(list(range(size)), backend="gloo")
    assert isinstance(inner, dist.ProcessGroup)
    _made.append(_Network(inner, rank, size))
    return _made[-1]


def emulated(latency: float, bandwidth: float) -> dist.ProcessGroup:
    """The emulated network over all ranks; latency in seconds, bandwidth in bytes per second."""
    if "NETWORK" not in dir(dist.Backend):
        dist.Backend.register_backend("network", _create, devices=["cpu"])
    group = dist.new_group(backend="network")
    assert isinstance(group, dist.ProcessGroup)
    _emulated.append(_made[-1])
    _emulated[-1].latency, _emulated[-1].bandwidth = latency, bandwidth
    return group


def transfers() -> list[Transfer]:
    """The transfers of the last network since the last call."""
    found, _emulated[-1].transfers = _emulated[-1].transfers, []
    return found
