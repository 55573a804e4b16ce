"""The losses of a pipeline's steps so far, and the moments at which the steps ended.

Contract: at most `_MOST` steps are kept, whatever the length of the run. Where there would be more, every second one is
dropped, and half as many steps are kept from then on. `add` waits for no device: losses are read when a page is made.
"""

from __future__ import annotations

import time
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
        self._losses: list[torch.Tensor] = []
        self._ends: list[float] = []
        self._every = self._waits = 1

    def add(self, loss: torch.Tensor) -> None:
        """Record a step that has just ended."""
        self._waits -= 1
        if self._waits:
            return
        self._waits = self._every
        self._losses.append(loss)
        self._ends.append(time.perf_counter())
        if len(self._ends) == _MOST:
            del self._losses[::2], self._ends[::2]
            self._every *= 2
            self._waits = self._every

    def view(self, losses: Sequence[float] | None = None, seconds: Sequence[float] | None = None) -> RunView:
        """The run so far; `losses`, `seconds`: those of the caller in place of the recorded ones, one for each step."""
        known = [float(each) for each in self._losses] if losses is None else losses
        times = [(end - start) / self._every for start, end in pairwise(self._ends)]
        recorded = RunView.of(known, [nan, *times] if times else (), self._every, _NOTE)
        if losses is None and seconds is None:
            return recorded
        given = RunView.of(losses or (), seconds or ())
        return RunView(
            recorded.losses if losses is None else given.losses,
            recorded.seconds if seconds is None else given.seconds,
            _NOTE if seconds is None else "",
        )
