"""The losses and end times of a pipeline's steps.

Contract: fewer than `_MOST` steps are kept; at `_MOST` every second one is dropped, and from then on half as many are recorded.
The losses are the elements of one tensor, whose size doubles. `add` copies a number on the loss's device and waits for nothing;
`view` reads the losses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from math import nan

import torch

from graphpp.report.run_view import RunView

_MOST, _FIRST = 2048, 64
_NOTE = "The time of a step is that from the end of the step before: it includes the optimizer and the loading of data."


class StepRecord:
    """The record of one pipeline on this rank: every `_every`-th step."""

    def __init__(self) -> None:
        self._losses, self._ends = torch.empty(0), list[float]()
        self._steps, self._every = 0, 1

    def add(self, loss: torch.Tensor) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            if len(self._ends) == len(self._losses):
                more = loss.new_empty(len(self._ends) or _FIRST)
                self._losses = torch.cat([self._losses, more]) if self._ends else more
            self._losses[len(self._ends)].copy_(loss.detach())
            self._ends.append(time.perf_counter())
        if len(self._ends) == _MOST:
            self._losses[: _MOST // 2] = self._losses[1:_MOST:2].clone()
            self._ends, self._every = self._ends[1::2], 2 * self._every

    def view(self, losses: Sequence[float] | None = None, seconds: Sequence[float] | None = None) -> RunView:
        """The run so far; `losses`, `seconds`: one per step, in place of the recorded ones."""
        own = self._losses[: len(self._ends)].tolist()
        times = [(end - start) / self._every for start, end in pairwise(self._ends)]
        recorded = RunView.of(own, [nan, *times] if times else (), self._every)
        given = RunView.of(() if losses is None else losses, () if seconds is None else seconds)
        return RunView(
            recorded.losses if losses is None else given.losses,
            recorded.seconds if seconds is None else given.seconds,
            _NOTE if seconds is None else "",
        )
