"""Copies of values that lie in memory as their originals do: gaps, repetitions and the order of dimensions included.

Contract: a kernel that reads the copy goes the same way as over the original. The elements are copied once, as a message
takes them (`transport.pack`): what `expand` repeats is stored once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from graphpp._torch.distributed import foreach_copy
from graphpp.runtime.program import TensorMeta
from graphpp.runtime.transport import Landing, pack


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape, strides and dtype of a value, without a name."""
    return TensorMeta("", tuple(value.shape), tuple(value.stride()), value.dtype)


def packed(value: torch.Tensor) -> torch.Tensor:
    """The elements of a value, each once, without gaps: a view of it where they lie so."""
    return pack(value, meta_of(value))


def place_like(value: torch.Tensor) -> Landing:
    """New memory for a copy, on the same device."""
    return Landing.of(meta_of(value), value.device)


def fill(places: Sequence[Landing], values: Sequence[torch.Tensor]) -> None:
    """Copy the elements of each value into its place; on CUDA a kernel for many of one dtype."""
    pairs: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for place, value in zip(places, values, strict=True):
        pairs[value.dtype].append((place.elements, packed(value)))
    for each in pairs.values():
        foreach_copy([place for place, _ in each], [elements for _, elements in each])


def copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of values in memory of their own, one for each, also where two share theirs."""
    places = [place_like(value) for value in values]
    fill(places, values)
    return [place.value() for place in places]


def laid_as(meta: TensorMeta, value: torch.Tensor) -> torch.Tensor:
    """A copy of a value in memory that has the strides of `meta`."""
    place = Landing.of(meta, value.device)
    place.elements.copy_(pack(value, meta))
    return place.value()
