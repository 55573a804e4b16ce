"""A layout as read from one of the dialects, before it meets the model and the machines.

Contract: `notes` has a sentence for each thing that graphpp prices in another way, or not at all. A reader raises
`ScheduleError` for what cannot be a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from graphpp.errors import ScheduleError

WHOLE: Mapping[str, Any] = {"recompute": None, "offload": None, "word_parts": False, "logits_tokens": None}
"""The choices that a complete layout leaves out."""


class Context(NamedTuple):
    """What a reader has to know: the number of GPUs, and of repeated layers in the model."""

    gpus: int
    layers: int


@dataclass(frozen=True)
class Layout:
    """`choices`: by name of `fixed.CHOICES`. `batch`, `tokens`, `dtype`, `float8`: what the layout is for (None: it says
    nothing), as arguments of `graphpp.plan`."""

    choices: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    batch: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    float8: str | None = None


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """The integer of an entry. Raises `ScheduleError`."""
    try:
        found = int(value)
    except (TypeError, ValueError):
        found = least - 1
    if found < least or isinstance(value, bool) or (isinstance(value, float) and value != found):
        raise ScheduleError(f"like: {name}: take an integer from {least}, got {value!r}")
    return found


def data_ranks(gpus: int, **sizes: int) -> int:
    """The ranks that these sizes leave to data parallelism. Raises `ScheduleError`."""
    ranks = prod(sizes.values())
    if gpus % ranks:
        given = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise ScheduleError(f"like: {given} makes {ranks} ranks, which do not divide {gpus} GPUs: take other sizes or machines")
    return gpus // ranks


def expert_shape(data: int, experts: int, name: str) -> int:
    """The data ranks of each expert. Raises `ScheduleError` for experts over other ranks than those of the data."""
    if data % experts:
        raise ScheduleError(f"like: {name} {experts}: graphpp places experts on data ranks alone, {data} here: take a divisor")
    return data // experts
