"""Choices that are made by measuring once, and kept in the disk cache for other processes and later runs.

Contract: `MeasuredChoices.choose(key, measure)` measures once per key, processor, torch version and number of threads. What
stands in the table and is none of the choices is measured anew. The functions that are timed run on tensors made from fake ones
(`sample`); symbolic sizes count as in the trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from graphpp._torch.symbols import hint
from graphpp.backends.processor import processor_name
from graphpp.cache.disk_cache import DiskCache


class MeasuredChoices:
    """One table of the cache; `choices`: the values that it may have."""

    def __init__(self, cache: DiskCache, table: str, choices: Collection[str]) -> None:
        self._cache, self._table = cache, table
        self._chosen = {key: value for key, value in cache.read(table).items() if value in choices}
        processor = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"
        self._machine = f"{processor}, torch {torch.__version__}, {torch.get_num_threads()} threads"

    def choose(self, key: str, measure: Callable[[], str]) -> str:
        """The choice for a key; `measure` makes a new one."""
        key = f"{self._machine}: {key}"
        if key not in self._chosen:
            self._chosen[key] = measure()
            with contextlib.suppress(OSError):  # full disk or deleted folder: other processes measure again
                self._cache.write(self._table, {key: self._chosen[key]})
        return self._chosen[key]


def shortest_times(runs: Sequence[Callable[[], Any]], rounds: int = 7) -> list[float]:
    """The shortest time of each function in seconds; the functions run in turn, `rounds` times after one warm-up."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if turn:  # turn 0 warms up
                best[index] = min(best[index], time.perf_counter() - began)
    return best


def sample(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout and on the same device as a fake one, with numbers to compute on."""
    shape, stride = ([*map(hint, sizes)] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).fill_(0.5)


def layout_of(value: torch.Tensor) -> str:
    """Shape and strides, as they stand in keys."""
    return f"{[*map(hint, value.shape)]}/{[*map(hint, value.stride())]}"
