"""Refuse parameters that another pipeline of this process has trained on another rank.

Contract
--------
- A rank trains the parameters of its own stages. Its copies of all other parameters keep the values that they had.
- After each training step `note` records the copies that take a gradient elsewhere, with their version counters. Torch
  increments the counter with every write in place, but for a write through `parameter.data`: such a copy stays refused.
- `check` raises `GraphPPError` if this rank is about to read a copy that another pipeline has left behind and nobody has
  written since. A record lives as long as the parameter: the copy is stale also when the other pipeline is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp.errors import GraphPPError
from graphpp.runtime.released import is_released

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass
class _Copy:
    """A copy that a pipeline has left behind: the pipeline's number, the rank in it that trains, the version counter."""

    trainer: int
    rank: int
    version: int


_COPIES = WeakTensorKeyDictionary()  # parameter -> list of `_Copy`, one for each pipeline that trains it elsewhere
_STEPS: dict[int, int] = {}  # training steps by the number of the pipeline that has left copies behind


class StaleCopies:
    """The copies that one pipeline leaves behind on this rank."""

    def __init__(self) -> None:
        self._number = len(_STEPS)
        _STEPS[self._number] = 0
        self._checked = 0

    def note(self, others: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Record a training step. `others`: the parameters that other ranks train, with the first such rank."""
        left = [(tensor, rank) for tensor, rank in others if not is_released(tensor) and tensor.requires_grad]
        for tensor, rank in left:
            copies = _COPIES.setdefault(tensor, [])
            own = next((copy for copy in copies if copy.trainer == self._number), None)
            if own is None:
                copies.append(_Copy(self._number, rank, tensor._version))
            else:
                own.version = tensor._version
        if left:
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
                    f"rank {copy.rank} of another pipeline of this process has trained the parameter {fqn}, and the copy on "
                    "this rank, which this pipeline reads, has its earlier value. Cut both pipelines so that each parameter "
                    "is on the same rank, train both with one pipeline, or load the trained values on every rank before "
                    "this call (model.load_state_dict)."
                )
        self._checked = steps
