"""The flat shard of parameters that the same stages read: this rank's rows, and the whole parameters while in use.

- A parameter is cut along its first dimension as torch's `Shard(0)` cuts it: each rank has `ceil(rows / ranks)` rows, the last
  ranks fewer or none. A rank's rows lie in its flat shard from `start` on, padded to that number of rows. The shards of one
  region, gathered from all ranks, lie at `ranks * start` in the whole buffer; there the parameter is contiguous memory with its
  original strides.
- `values` has this rank's rows of all parameters, the only parameter memory that lives from step to step. `local(fqn)` and
  `whole(fqn)` are views; a view of a whole parameter may be kept, and has values from `ready` to the last `reshard`.
- `unshard` starts to gather and returns at once; `ready` waits. All ranks of the group call both in one order. The parameters
  stay whole until `reshard` was called as often as `unshard`; then their memory is freed, if `frees`.
- Gathering copies nothing on a rank: rows arrive in their place in the whole parameter. If whole parameters have another dtype,
  a rank sends a cast copy of its rows, which is freed when they have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many
from graphpp.errors import GraphPPError
from graphpp.runtime.parameter_rows import rows_of

_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Region:
    """The place of one parameter in a flat shard, from the element `start` on.

    `rows`: of the first rank's shard, the largest number; `width`: the elements of a row.
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
        return rows_of(self.shape[0], self.ranks, rank)

    def lengths(self) -> list[int]:
        """The number of elements of each rank's rows."""
        return [len(self.rows_of(rank)) * self.width for rank in range(self.ranks)]


@dataclass(frozen=True)
class Layout:
    """The regions of a flat shard by FQN, and its total elements."""

    regions: Mapping[str, Region]
    elements: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], ranks: int, itemsize: int) -> Layout:
        """The layout of parameters, none 0-dim. `itemsize`: the smaller element size, of shards and whole parameters, in bytes.

        Raises `GraphPPError` for a parameter whose rows are not consecutive pieces of memory.
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


class FlatShard:
    """Parameters of one dtype that the same stages of a rank read."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        frees: bool,
        whole_dtype: torch.dtype | None = None,
    ) -> None:
        """Only shapes, strides and dtype of `tensors` are read. `frees`: whether `reshard` frees whole parameters."""
        self._group, self._rank, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        dtype = next(iter(tensors.values())).dtype
        self.whole_dtype = dtype if whole_dtype is None else whole_dtype
        self.layout = Layout.of(tensors, ranks, min(dtype.itemsize, self.whole_dtype.itemsize))
        self.values = torch.zeros(self.layout.elements, dtype=dtype, device=device)
        self._ranks = ranks
        self._regions = [region for region in self.layout.regions.values() if region.elements]
        self._users, self._frees = 0, frees
        self._work: dist.Work | None = None
        self._sent: list[torch.Tensor] = []  # the rows that are under way

    def local(self, fqn: str, flat: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of a parameter, as a view of `values`, or of a tensor `flat` with the same layout."""
        region = self.layout.regions[fqn]
        shape = (len(region.rows_of(self._rank)), *region.shape[1:])
        return (self.values if flat is None else flat).as_strided(shape, region.stride, region.start)

    def rows(self, fqn: str) -> torch.Tensor:
        """This rank's rows of a parameter, [elements], padded to as many as the first rank has; a gather sends these."""
        region = self.layout.regions[fqn]
        return self.values[region.start :][: region.elements]

    def whole(self, fqn: str) -> torch.Tensor:
        return self._memory.whole[fqn]

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        rows = self.layout.regions[fqn].rows_of(self._rank)
        self.local(fqn).copy_(whole[rows.start : rows.stop])

    def unshard(self) -> None:
        """Start to gather the whole parameters, unless they are whole."""
        self._users += 1
        if self._users > 1:
            return
        self._memory.storage.resize_(self._memory.bytes)
        rows = self.values.to(dtype=self.whole_dtype)
        self._sent = [rows[each.start :][: each.elements] for each in self._regions]
        self._work = all_gather_many(self._memory.received, self._sent, self._group) if self._sent else None

    def ready(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._sent = []

    def reshard(self) -> None:
        """Free the whole parameters, if no other stage uses them."""
        self._users -= 1
        if not self._users and self._frees:
            self.ready()
            self._memory.storage.resize_(0)

    def drop(self) -> None:
        """Forget a gather in flight after a failure; the pipeline cannot be used afterwards."""
        self._users, self._work, self._sent = 0, None, []

    @cached_property
    def _memory(self) -> _WholeMemory:
        """Made at the first use of whole parameters; never if programs gather single layers."""
        ranks, regions = self._ranks, self.layout.regions
        gathered = torch.empty(ranks * self.layout.elements, dtype=self.whole_dtype, device=self.values.device)
        received = [gathered[ranks * each.start :][: ranks * each.elements] for each in self._regions]
        whole = {fqn: gathered.as_strided(each.shape, each.stride, ranks * each.start) for fqn, each in regions.items()}
        storage = gathered.untyped_storage()
        made = _WholeMemory(storage, storage.nbytes(), received, whole)
        storage.resize_(0)
        return made


class _WholeMemory(NamedTuple):
    """The memory of whole parameters: `bytes` while they are whole, else none. `received`, `whole`: views of it, which stay."""

    storage: torch.UntypedStorage
    bytes: int
    received: Sequence[torch.Tensor]
    whole: Mapping[str, torch.Tensor]
