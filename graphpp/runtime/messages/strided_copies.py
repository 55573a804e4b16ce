"""Copies of tensors with the strides of their originals: gaps, expanded dimensions and the order of dimensions included.

Contract: a kernel computes the same bits from the copy as from the original, because it sees the same strides. The elements are
copied as a message carries them (`wire_layout.py`): an element that `expand` repeats is stored once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from graphpp._torch.distributed import foreach_copy
from graphpp.runtime.messages.wire_layout import ReceiveBuffer, layout_of
from graphpp.runtime.program import TensorMeta


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape, strides and dtype of a value, without a name."""
    return TensorMeta("", tuple(value.shape), tuple(value.stride()), value.dtype)


def elements_of(value: torch.Tensor) -> torch.Tensor:
    """The stored elements of a value, without gaps: a view of the value if it has none, else a copy."""
    return layout_of(meta_of(value)).pack(value)


def buffer_like(value: torch.Tensor) -> ReceiveBuffer:
    """New memory for a copy of a value, on the value's device."""
    return layout_of(meta_of(value)).buffer(value.device)


def copy_elements(buffers: Sequence[ReceiveBuffer], values: Sequence[torch.Tensor]) -> None:
    """Copy the elements of each value into its buffer; on CUDA one kernel copies many values of one dtype."""
    pairs: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for buffer, value in zip(buffers, values, strict=True):
        pairs[value.dtype].append((buffer.elements, elements_of(value)))
    for each in pairs.values():
        foreach_copy([into for into, _ in each], [elements for _, elements in each])


def copy_all(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of values, each in memory of its own, even of values that share memory."""
    buffers = [buffer_like(value) for value in values]
    copy_elements(buffers, values)
    return [buffer.value() for buffer in buffers]


def copy_with_strides(meta: TensorMeta, value: torch.Tensor) -> torch.Tensor:
    """A copy of a value with the strides of `meta`, which has the value's shape and dtype."""
    layout = layout_of(meta)
    buffer = layout.buffer(value.device)
    buffer.elements.copy_(layout.pack(value))
    return buffer.value()
