"""An all-to-all over gloo that takes the time of a network, and remembers how long each took and who stood still for it.

Contract: `emulated(ranks, latency, bandwidth)` is a process group whose `all_to_all_single` moves its values with gloo and is
done no sooner than a link with that latency (seconds) and bandwidth (bytes per second) would be: one transfer at a time,
without taking a processor's time. Latency 0 and bandwidth 0 (none) leave gloo as it is. `transfers(group)` has them all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Transfer:
    """One collective: when it was issued and done, and how long its wait stood still, in seconds."""

    issued: float
    done: float
    blocked: float = 0.0

    @property
    def seconds(self) -> float:
        """From issue to done."""
        return self.done - self.issued


class _Pending(dist.Work):
    """A transfer under way, for whoever waits for it."""

    def __init__(self, inner: dist.Work, transfer: Transfer, kept: set[_Pending]) -> None:
        super().__init__()
        self._inner, self._transfer, self._kept = inner, transfer, kept
        kept.add(self)  # torch's registry holds only the half of it that is C++
        inner.get_future().add_done_callback(self._arrived)

    def _arrived(self, future: Any) -> None:
        self._transfer.done = max(self._transfer.done, time.perf_counter())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Stand still until it is done."""
        began = time.perf_counter()
        self._inner.wait()
        time.sleep(max(0.0, self._transfer.done - time.perf_counter()))
        self._transfer.blocked += time.perf_counter() - began
        self._kept.discard(self)
        return True


class _Network(dist.ProcessGroup):
    """Gloo, slowed down."""

    latency = bandwidth = 0.0

    def __init__(self, inner: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner, self.transfers = inner, list[Transfer]()
        self._free = 0.0  # when the link is
        self._pending: set[_Pending] = set()

    def alltoall_base(self, output: Tensor, given: Tensor, out: list[int], into: list[int], options: Any = None) -> dist.Work:
        now = time.perf_counter()
        takes = self.latency + (given.nbytes / self.bandwidth if self.bandwidth else 0.0)
        self._free = max(now, self._free) + takes if takes else now
        self.transfers.append(Transfer(now, self._free))
        work = self.inner.alltoall_base(output, given, out, into, dist.AllToAllOptions())
        return _Pending(work, self.transfers[-1], self._pending)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "network"


_made: list[_Network] = []


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> _Network:
    inner = dist.new_group(list(range(size)), backend="gloo")
    assert isinstance(inner, dist.ProcessGroup)
    _made.append(_Network(inner, rank, size))
    return _made[-1]


def emulated(latency: float, bandwidth: float) -> dist.ProcessGroup:
    """The network over all ranks."""
    if "NETWORK" not in dir(dist.Backend):
        dist.Backend.register_backend("network", _create, devices=["cpu"])
    group = dist.new_group(backend="network")
    assert isinstance(group, dist.ProcessGroup)
    _made[-1].latency, _made[-1].bandwidth = latency, bandwidth
    return group


def transfers() -> list[Transfer]:
    """Those of the network made last, since they were last asked for."""
    found, _made[-1].transfers = _made[-1].transfers, []
    return found
