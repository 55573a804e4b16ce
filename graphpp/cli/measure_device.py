"""Measure the kernels of `calibrate.py` on this rank's device; every rank of a job measures at the same time.

Contract: `measure(device, group)` gives the file's document. Seconds are medians over `REPEATS` of the mean over one window of
calls. On CUDA both ends of a window are events, and the host is ahead: products keep the stream busy while it enqueues. The
window is long enough that a GPU at its power limit lowers its clock, as in a training step. Operands are random numbers from
a pool larger than the L2 cache, and each call takes the next ones.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import cycle
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from graphpp._torch.distributed import all_gather_many
from graphpp.backends.kernels import processor_name
from graphpp.cli.calibrate import DATA_SHEETS, Kernel, calibrated, document, kernels
from graphpp.errors import GraphPPError
from graphpp.streams import timing_event, wait_for_device

REPEATS = 7
_ALIGNED = 128  # elements
_CALLS = 100  # the most in a window: a stream holds some 1,000 kernels, and a backward has several
_GATHERS = 10  # calls in a window: the same number on every rank
_PROBES = 8


def measure(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The document of a device. Raises `GraphPPError` for measurements that cannot be right, and ranks on several machines."""
    on_gpu, ranks = device.type == "cuda", 1 if group is None else dist.get_world_size(group)
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks:
        raise GraphPPError("--calibrate: the ranks are on several machines: run it on one machine, with a rank for each device")
    name = torch.cuda.get_device_name(device) if on_gpu else processor_name()
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory
    known, watch = DATA_SHEETS.get(name), Stopwatch(device, group)
    times = {each: watch.seconds(each) for each in kernels(on_gpu, known is not None, ranks)}
    found = calibrated(times, name, known, memory, device.type)
    peaks = f"the data sheet of {known.name}" if known else "the largest measured rates: no data sheet has this name"
    gathers = f"an all-gather of {ranks} ranks"
    within = gathers if ranks > 1 else "usual figures: run under torchrun on all devices to measure it"
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": name, "torch": str(torch.__version__),
        "cuda": torch.version.cuda, "driver": _driver() if on_gpu else None, "ranks": ranks,
        "notes": [f"peaks: {peaks}", f"link within a machine: {within}", "link between machines: usual figures"],
    }  # fmt: skip
    return document(found, times, about)


def _driver() -> str | None:
    """The driver's version and the power limit of the first GPU, as `nvidia-smi` prints them; None without that program."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().partition("\n")[0] or None


class Stopwatch:
    """Times kernels on a device: in bfloat16 on CUDA, in float32 on a CPU."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group, self._on_gpu = device, group, device.type != "cpu"
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._pool = torch.randn(2**29 if self._on_gpu else 2**21, dtype=self._dtype, device=device)
        self._next = 0
        self._window = 0.05 if self._on_gpu else 0.002  # seconds
        self._filling = 0.0  # seconds of one product that keeps the stream busy; 0: not measured yet
        if self._on_gpu:
            self._window_of(self._fill, 5)
            self._filling = self._window_of(self._fill, 20)

    def seconds(self, kernel: Kernel) -> float:
        """Median seconds of one call."""
        self._next, call = 0, getattr(self, f"_{kernel.kind}")(kernel)
        for _ in range(3):
            call()
        wait_for_device(self._device)
        began = time.perf_counter()
        for _ in range(_PROBES):
            call()
        enqueued = (time.perf_counter() - began) / _PROBES
        wait_for_device(self._device)
        one = (time.perf_counter() - began) / _PROBES
        count = _GATHERS if kernel.kind == "all_gather" else min(_CALLS, max(1, round(self._window / one)))
        return statistics.median(self._window_of(call, count, enqueued * count) for _ in range(REPEATS))

    def _window_of(self, call: Callable[[], object], count: int, enqueuing: float = 0.0) -> float:
        """Seconds of each of `count` calls; `enqueuing`: the host's seconds for all, in which the stream has other work."""
        if not self._on_gpu:
            began = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - began) / count
        for _ in range(ceil(1.5 * enqueuing / self._filling) if self._filling else 0):
            self._fill()
        first = timing_event(self._device)
        for _ in range(count):
            call()
        last = timing_event(self._device)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count

    def _fill(self) -> None:
        side = 4096
        torch.mm(self._pool[: side * side].view(side, side), self._pool[-side * side :].view(side, side))

    def _take(self, *shape: int) -> torch.Tensor:
        """The next part of the pool."""
        size = prod(shape)
        begin = self._next if self._next + size <= len(self._pool) else 0
        self._next = begin + -(-size // _ALIGNED) * _ALIGNED
        return self._pool[begin : begin + size].view(shape)

    def _launch(self, kernel: Kernel) -> Callable[[], object]:
        one = self._take(1)
        return lambda: torch.neg(one, out=one)

    def _product(self, kernel: Kernel) -> Callable[[], object]:
        rows, columns, inner = kernel.sizes
        return lambda: torch.mm(self._take(rows, inner), self._take(columns, inner).t())  # as a linear layer

    _narrow = _product

    def _peak(self, kernel: Kernel) -> Callable[[], object]:
        rows, columns, inner = kernel.sizes
        left, right = (self._take(each, inner).to(getattr(torch, kernel.dtype)) for each in (rows, columns))
        return lambda: torch.mm(left, right.t())

    def _heads(self, kernel: Kernel) -> torch.Tensor:
        batch, heads, length, width = kernel.sizes
        return self._take(batch, length, heads, width).transpose(1, 2)  # as from linear layers

    def _attention(self, kernel: Kernel) -> Callable[[], object]:
        return lambda: _attend([self._heads(kernel) for _ in range(3)])

    def _attention_backward(self, kernel: Kernel) -> Callable[[], object]:
        cache = torch.cuda.get_device_properties(self._device).L2_cache_size if self._on_gpu else 0
        graphs = cycle([self._graph(kernel) for _ in range(ceil(2 * cache / kernel.nbytes) or 1)])

        def call() -> object:
            inputs, output = next(graphs)
            return torch.autograd.grad(output, inputs, output.detach(), retain_graph=True)

        return call

    def _graph(self, kernel: Kernel) -> tuple[list[torch.Tensor], torch.Tensor]:
        inputs = [self._heads(kernel).detach().requires_grad_() for _ in range(3)]
        return inputs, _attend(inputs)

    def _traffic(self, kernel: Kernel) -> Callable[[], object]:
        return lambda: torch.neg(self._take(*kernel.sizes), out=self._take(*kernel.sizes))

    def _pinned(self, kernel: Kernel) -> torch.Tensor:
        return torch.empty(kernel.sizes, dtype=self._dtype, pin_memory=True).copy_(self._take(*kernel.sizes))

    def _to_host(self, kernel: Kernel) -> Callable[[], object]:
        pinned = self._pinned(kernel)
        return lambda: pinned.copy_(self._take(*kernel.sizes), non_blocking=True)

    def _from_host(self, kernel: Kernel) -> Callable[[], object]:
        pinned = self._pinned(kernel)
        return lambda: self._take(*kernel.sizes).copy_(pinned, non_blocking=True)

    def _all_gather(self, kernel: Kernel) -> Callable[[], object]:
        elements, ranks = kernel.sizes
        result, part = torch.empty(elements, dtype=self._dtype, device=self._device), self._take(elements // ranks)
        group = self._group
        assert group is not None, "one rank gathers nothing"
        return lambda: all_gather_many([result], [part], group).wait()  # as for shards


def _attend(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
