"""TRL's fused LM head in a form that a capture follows.

Contract: `let_capture` changes TRL's module for this process. On the CPU log-probabilities keep their bits. On a GPU operators
of torch replace TRL's Triton kernels, which no capture follows; results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import SymInt
from trl.kernels import chunked_logprob
from trl.trainer import utils


def let_capture() -> None:
    """Let a capture follow the fused LM head, for any number of tokens."""
    modules: tuple[Any, ...] = (chunked_logprob, utils)
    for module in modules:
        module._use_triton = _no_triton
    modules[0].range, modules[0].min = _chunks, _smaller


def _no_triton(device: Any) -> bool:
    return False


def _chunks(start: int, stop: Any, step: int) -> Sequence[int]:
    """As `range`; for a number that varies between microbatches, the captured graph is for this number of chunks."""
    if not isinstance(stop, SymInt):
        return range(start, stop, step)
    found = [start]
    while found[-1] + step < stop:
        found.append(found[-1] + step)
    return found


def _smaller(one: Any, other: Any) -> Any:
    """As `min`, which a trace would keep as an expression."""
    return one if one <= other else other
