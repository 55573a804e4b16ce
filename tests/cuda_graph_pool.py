"""CUDA graphs without CUDA: a recorder for the CPU whose recordings behave like graphs of one memory pool.

Contract: recording a program leaves no results. A replay runs the program on the recorded memory and overwrites the results of
every other recording in the pool. So a test fails if a result is read after another replay, or if an argument was not copied
in. `TracedPool` warms up on a side stream as on CUDA, for a trace of `tests/device_trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpp.backends.cuda_graphs import CudaGraphRecorder

Results = Sequence[Any]


class Pool:
    """A `CudaGraphRecorder` for the CPU whose recordings share memory: each replay overwrites the results of all recordings."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recordings = self.replays = self.warm_ups = 0
        self._results: list[Results] = []

    def warm_up(self, run: Callable[[], Results]) -> Results:
        self.warm_ups += 1
        return run()

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        self.recordings += 1
        results = [None if each is None else each.clone(memory_format=torch.preserve_format) for each in run()]
        self._results.append(results)
        spoil(results)

        def replay() -> None:
            self.replays += 1
            for others in self._results:
                spoil(others)
            for mine, new in zip(results, run(), strict=True):
                if mine is not None:
                    mine.copy_(new)

        return replay, results


def spoil(values: Results) -> None:
    for value in (value for value in values if value is not None):
        value.fill_(float("nan") if value.is_floating_point() else 1)


class TracedPool(Pool):
    """Runs warm-ups as a `CudaGraphRecorder` does; made while a trace is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._on_cuda = CudaGraphRecorder(self.device)

    def warm_up(self, run: Callable[[], Results]) -> Results:
        self.warm_ups += 1
        return self._on_cuda.warm_up(run)
