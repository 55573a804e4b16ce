"""Refuse parameters that another pipeline of this process has trained on another rank.

Contract
--------
- A rank trains the parameters of its own stages. Its copies of all other parameters keep the values that they had.
- After each training step `note` records these copies with their version counters, which every write in place increments.
- `check` raises `GraphPPError` if this rank is about to read a copy that another pipeline has left behind and nobody has
  written since. A record lives as long as the parameter: the copy is stale also when the other pipeline is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp.errors import GraphPPError

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass
class _Copy:
    """A copy that a pipeline has left behind: the number of the pipeline, the version counter, the rank that trains it."""

    trainer: int
    version: int
    rank: int


_COPIES = WeakTensorKeyDictionary()  # parameter -> list of `_Copy`, one for each pipeline that trains it elsewhere
_STEPS: dict[int, int] = {}  # training steps by the number of the pipeline that has left copies behind


class StaleCopies:
    """The copies that one pipeline leaves behind on this rank."""

    def __init__(self) -> None:
        self._number = len(_STEPS)
        _STEPS[self._number] = 0
        self._left: list[tuple[torch.Tensor, _Copy]] | None = None
        self._checked = 0

    def note(self, others: Callable[[], Iterable[tuple[torch.Tensor, int]]]) -> None:
        """Record a training step. `others`: the parameters that other ranks train, with the first such rank."""
        if self._left is None:
            self._left = [(tensor, _Copy(self._number, 0, rank)) for tensor, rank in others() if tensor.requires_grad]
            for tensor, copy in self._left:
                _COPIES.setdefault(tensor, []).append(copy)
        for tensor, copy in self._left:
            copy.version = tensor._version
        if self._left:
            _STEPS[self._number] += 1

    def check(self, own: Callable[[], Named]) -> None:
        """Raise `GraphPPError` if a parameter that this rank reads is trained elsewhere. `own`: this rank's parameters."""
        steps = sum(count for number, count in _STEPS.items() if number != self._number)
        if steps == self._checked:
            return
        for fqn, tensor in own():
            copies = (copy for copy in _COPIES.get(tensor, ()) if copy.trainer != self._number)
            copy = next((copy for copy in copies if copy.version == tensor._version), None)
            if copy is not None:
                raise GraphPPError(
                    f"the parameter {fqn} was trained on rank {copy.rank} by another pipeline of this process, and the copy on "
                    "this rank, which this pipeline reads, has its earlier value. Cut both pipelines so that each parameter "
                    "is on the same rank, train both with one pipeline, or load the trained values on every rank before "
                    "this call (model.load_state_dict)."
                )
        self._checked = steps
