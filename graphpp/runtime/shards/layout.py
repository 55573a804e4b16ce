"""Where the rows of parameters lie in a flat shard, so that gathering them makes whole parameters without a copy.

Contract
--------
- A parameter is cut along its first dimension as torch's `Shard(0)` cuts it: each rank has `ceil(rows / ranks)` rows, the last
  ones fewer or none. Rank r's rows lie in its flat shard from `start` on, followed by padding up to that number of rows.
- The shards of all ranks, gathered for one region after the other, lie at `ranks * start` in the whole buffer; there the
  parameter is one piece of memory with the strides that it had.
- Regions do not overlap, are in the order of the parameters, and start at multiples of 64 bytes, as torch's own memory does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphpp.errors import GraphPPError
from graphpp.runtime.shards.local_rows import rows_of

_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Region:
    """The place of one parameter, from the element `start` of a flat shard on.

    `rows`: of the first rank's shard, which no other exceeds; `width`: the elements of a row.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    ranks: int
    rows: int
    width: int

    @property
    def elements(self) -> int:
        """The elements of a full shard."""
        return self.rows * self.width

    def rows_of(self, rank: int) -> range:
        """The rows of the parameter that `rank` holds."""
        return rows_of(self.shape[0], self.ranks, rank)

    def lengths(self) -> list[int]:
        """The elements of each rank's rows."""
        return [len(self.rows_of(rank)) * self.width for rank in range(self.ranks)]


@dataclass(frozen=True)
class Layout:
    """The regions of a flat shard by FQN, and its elements."""

    regions: Mapping[str, Region]
    elements: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], ranks: int, itemsize: int) -> Layout:
        """The layout of parameters, none of them 0-dim. `itemsize`: the least bytes of an element, in shards and when whole.

        Raises `GraphPPError` for a parameter whose rows are not pieces of memory that follow each other.
        """
        regions, start = dict[str, Region](), 0
        for fqn, tensor in tensors.items():
            rows, width = -(-tensor.shape[0] // ranks), math.prod(tensor.shape[1:])
            _check_rows(fqn, tensor, width)
            region = regions[fqn] = Region(tuple(tensor.shape), tensor.stride(), start, ranks, rows, width)
            step = max(1, _ALIGNED // itemsize)
            start += -(-region.elements // step) * step
        return cls(regions, start)


def _check_rows(fqn: str, tensor: torch.Tensor, width: int) -> None:
    if tensor.numel() == 0:
        return
    row = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if row != width or (tensor.shape[0] > 1 and tensor.stride(0) != width):
        raise GraphPPError(
            f"{fqn} of shape {list(tensor.shape)} has strides {list(tensor.stride())}, so its rows are not pieces of memory of "
            "their own, and dp_shard cuts parameters along their first dimension: make the parameter contiguous before "
            "graphpp.compile, parameter.data = parameter.data.contiguous()"
        )
