"""TRL's fused LM head in a form that a capture follows.

Contract: `let_capture` changes TRL's module for this process. Log-probabilities keep their bits on the CPU. On a GPU TRL's torch
form replaces its Triton kernels, which no capture follows; results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import SymInt
from trl.kernels import chunked_logprob
from trl.trainer import utils


def let_capture() -> None:
    """Let a capture follow the fused LM head, for any number of tokens."""
    modules: tuple[Any, ...] = (chunked_logprob, utils)
    for module in modules:
        module._use_triton = _no_triton
    modules[0].range = _chunks


def _no_triton(device: Any) -> bool:
    return False


def _chunks(start: int, stop: Any, step: int) -> Iterable[int]:
    """As `range`. For a number that varies between microbatches a single chunk, if the number of the capture fits in it."""
    return (start,) if isinstance(stop, SymInt) and start == 0 and stop <= step else range(start, stop, step)
