"""The losses of a pipeline's steps so far, and the moments at which the steps ended.

Contract: at most `_MOST` steps are kept. Where there would be more, every second one is dropped, and half as many are kept from
then on. `add` copies a number on the loss's device and waits for nothing: losses are read when a page is made.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import nan

import torch

from graphpp.report.run_view import RunView

_MOST = 2048
_NOTE = "The time of a step is that from the end of the step before: it includes the optimizer and the loading of data."


class StepRecord:
    """The record of one pipeline on this rank."""

    def __init__(self) -> None:
        self._losses: torch.Tensor | None = None  # [_MOST], on the device of the losses
        self._ends = array("d")
        self._kept, self._every, self._waits = 0, 1, 1

    def add(self, loss: torch.Tensor) -> None:
        """Record a step that has just ended."""
        self._waits -= 1
        if self._waits:
            return
        self._waits = self._every
        if self._losses is None:
            self._losses = torch.zeros(_MOST, dtype=torch.float64, device=loss.device)
            self._ends.frombytes(bytes(_MOST * self._ends.itemsize))
        self._losses[self._kept] = loss.detach()
        self._ends[self._kept] = time.perf_counter()
        self._kept += 1
        if self._kept == _MOST:
            half = self._kept // 2
            self._losses[:half] = self._losses[1 : 2 * half : 2].clone()
            self._ends[:half] = self._ends[1 : 2 * half : 2]
            self._kept, self._every = half, 2 * self._every
            self._waits = self._every

    def view(self, losses: Sequence[float] | None = None, seconds: Sequence[float] | None = None) -> RunView:
        """The run so far; `losses`, `seconds`: those of the caller in place of the recorded ones, one for each step."""
        own = [] if self._losses is None else self._losses[: self._kept].tolist()
        times = [(end - start) / self._every for start, end in pairwise(self._ends[: self._kept])]
        recorded = RunView.of(own, [nan, *times] if times else (), self._every, _NOTE)
        given = RunView.of(losses or (), seconds or ())
        return RunView(
            recorded.losses if losses is None else given.losses,
            recorded.seconds if seconds is None else given.seconds,
            _NOTE if seconds is None else "",
        )
