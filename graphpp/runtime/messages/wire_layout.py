"""The memory layout of tensors, the order in which their elements travel in a message, and copies with the same strides.

- A tensor travels as its stored elements in memory order, and arrives with the strides with which the graph was captured, gaps
  and expanded dimensions included: a kernel computes the same bits from it as in one process. (Elements of overlapping windows
  travel once for every window.) Copies within a rank are made by the same rules.
- `layout_of` resolves a layout once for each `TensorMeta`, before the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from graphpp._torch.distributed import foreach_copy
from graphpp._torch.symbols import hint
from graphpp.runtime.program import TensorMeta


@dataclass(frozen=True)
class WireLayout:
    """The memory of a tensor of `shape` and `dtype`, and the order in which its elements travel.

    `stored`: the shape, with 1 for each expanded dimension. `order`: the dimensions, largest stride first. `dense`: in that
    order the elements fill their memory without gaps, so no packed copy is needed. `plain`: dense, in the usual order of
    dimensions, nothing expanded. `windows`: elements overlap, and travel once for each window.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]
    dense: bool
    plain: bool = False
    windows: bool = False

    @property
    def packed(self) -> list[int]:
        """The shape of the elements in a message."""
        return [self.stored[dim] for dim in self.order]

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """The stored elements of `value` for a message: a view, or a copy where `value` has gaps or other strides."""
        if self.plain and value.is_contiguous() and not (value.is_neg() or value.is_conj()):
            return value
        value = value.resolve_conj().resolve_neg()
        for dim, size in enumerate(self.stored):
            if size != self.shape[dim]:
                value = value.narrow(dim, 0, size)
        return value.permute(self.order).contiguous()

    def buffer(self, device: torch.device) -> ReceiveBuffer:
        strided = torch.empty_strided(self.stored, self.stride, dtype=self.dtype, device=device)
        if self.plain:
            return ReceiveBuffer(strided, strided, self)
        if self.dense:
            return ReceiveBuffer(strided.permute(self.order), strided, self)
        return ReceiveBuffer(torch.empty(self.packed, dtype=self.dtype, device=device), strided, self)


@lru_cache(maxsize=2**14)
def layout_of(meta: TensorMeta) -> WireLayout:
    pairs = list(zip(meta.shape, meta.stride, strict=True))
    stored = tuple(min(size, 1) if stride == 0 else size for size, stride in pairs)
    order = tuple(sorted(range(len(pairs)), key=lambda dim: (-meta.stride[dim], -stored[dim], dim)))
    dense, extent = True, 1
    for dim in reversed(order):
        if stored[dim] > 1:
            if meta.stride[dim] < extent:  # overlapping elements
                usual = tuple(range(len(pairs)))
                return WireLayout(meta.shape, meta.dtype, meta.shape, meta.stride, usual, dense=False, windows=True)
            dense = dense and meta.stride[dim] == extent
            extent = meta.stride[dim] * (stored[dim] - 1) + extent
    plain = dense and stored == meta.shape and order == tuple(range(len(pairs)))
    return WireLayout(meta.shape, meta.dtype, stored, meta.stride, order, dense, plain)


@dataclass(slots=True)
class ReceiveBuffer:
    """Memory in which a value arrives: the message writes `elements`; `strided` has the captured strides."""

    elements: torch.Tensor
    strided: torch.Tensor
    layout: WireLayout

    @staticmethod
    def nbytes(meta: TensorMeta) -> int:
        """The bytes that a value takes in the buffer until it is read, including gaps, and a packed copy if there are gaps."""
        known = replace(meta, shape=tuple(map(hint, meta.shape)), stride=tuple(map(hint, meta.stride)))
        layout = layout_of(known)
        sizes = zip(layout.stored, layout.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in sizes) if all(layout.stored) else 0
        packed = 0 if layout.dense else prod(layout.packed)
        return (span + packed) * known.dtype.itemsize

    def value(self) -> torch.Tensor:
        """The value, once its elements have arrived."""
        layout = self.layout
        if layout.plain:
            return self.strided
        if layout.windows:
            _write_windows(self.strided, self.elements)
        elif not layout.dense:
            self.strided.permute(layout.order).copy_(self.elements)
        return self.strided if layout.stored == layout.shape else self.strided.expand(layout.shape)


def _write_windows(strided: torch.Tensor, elements: torch.Tensor) -> None:
    """Write elements into overlapping windows; elements that share memory have equal values."""
    flat = strided.as_strided((strided.untyped_storage().nbytes() // strided.element_size(),), (1,))
    index = torch.arange(len(flat), device=strided.device).as_strided(strided.shape, strided.stride())
    flat.index_copy_(0, index.reshape(-1), elements.reshape(-1))


def meta_of(value: torch.Tensor) -> TensorMeta:
    return TensorMeta("", tuple(value.shape), tuple(value.stride()), value.dtype)


def elements_of(value: torch.Tensor) -> torch.Tensor:
    """The stored elements of a value without gaps: a view if the value has none, else a copy."""
    return layout_of(meta_of(value)).pack(value)


def buffer_like(value: torch.Tensor) -> ReceiveBuffer:
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
