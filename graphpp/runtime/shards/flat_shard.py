"""The flat shard of parameters that the same stages read: this rank's rows of each, and the whole parameters while in use.

Contract
--------
- `values` has this rank's rows of all parameters, the only memory of theirs that lives from step to step. `local(fqn)` and
  `whole(fqn)` are views; a view of a whole parameter may be kept, and has values from `ready` to the last `reshard`.
- `unshard` starts to gather and returns at once; `ready` waits. Both are called by all ranks of the group in one order. The
  parameters stay whole until `reshard` was called as often as `unshard`. Then their memory goes back, if it was made so.
- Gathering copies nothing on a rank: each rank's rows arrive where the whole parameter has them (`layout.py`). Where whole
  parameters have another dtype than the rows, a rank casts its rows, and sends the copy, which is gone when they have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many
from graphpp.runtime.shards.layout import Layout, Region


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
        """`tensors`: the parameters, of any device: their shapes, strides and dtype count here.

        `frees`: whether the memory of whole parameters goes back when they are not used. `whole_dtype`: of whole parameters
        (None: their own).
        """
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
        """This rank's rows of a parameter; with `flat` those of a tensor that is laid out as `values`."""
        region = self.layout.regions[fqn]
        shape = (len(region.rows_of(self._rank)), *region.shape[1:])
        return (self.values if flat is None else flat).as_strided(shape, region.stride, region.start)

    def rows(self, fqn: str) -> torch.Tensor:
        """This rank's rows of a parameter, [elements], padded to as many as the first rank has: what a gather sends."""
        region = self.layout.regions[fqn]
        return self.values[region.start :][: region.elements]

    def whole(self, fqn: str) -> torch.Tensor:
        """The whole parameter."""
        return self._memory.whole[fqn]

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a whole parameter."""
        rows = self.layout.regions[fqn].rows_of(self._rank)
        self.local(fqn).copy_(whole[rows.start : rows.stop])

    @property
    def whole_bytes(self) -> int:
        """The bytes of whole parameters that stand now."""
        return self._memory.nbytes if "_memory" in vars(self) else 0

    def unshard(self) -> None:
        """Start to gather the whole parameters, if they are not whole."""
        self._users += 1
        if self._users > 1:
            return
        self._memory.take()
        rows = self.values.to(dtype=self.whole_dtype)
        self._sent = [rows[each.start :][: each.elements] for each in self._regions]
        self._work = all_gather_many(self._memory.received, self._sent, self._group) if self._sent else None

    def ready(self) -> None:
        """Wait until the parameters are whole."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._sent = []

    def reshard(self) -> None:
        """Give the memory of the whole parameters back, if no other stage uses them."""
        self._users -= 1
        if not self._users and self._frees:
            self.ready()
            self._memory.give_back()

    def drop(self) -> None:
        """Forget a gathering that is under way, after a failure; the pipeline cannot be used any more."""
        self._users, self._work, self._sent = 0, None, []

    @cached_property
    def _memory(self) -> _WholeMemory:
        """Made when whole parameters are asked for; never, where programs gather single layers."""
        gathered = torch.empty(self._ranks * self.layout.elements, dtype=self.whole_dtype, device=self.values.device)
        return _WholeMemory(gathered, self.layout, self._regions, self._ranks)


class _WholeMemory:
    """The memory of whole parameters, which comes and goes; `received` and `whole` are views of it."""

    def __init__(self, gathered: torch.Tensor, layout: Layout, regions: Sequence[Region], ranks: int) -> None:
        self.received = [gathered[ranks * each.start :][: ranks * each.elements] for each in regions]
        self.whole = {
            fqn: gathered.as_strided(each.shape, each.stride, ranks * each.start) for fqn, each in layout.regions.items()
        }
        self._storage = gathered.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.give_back()

    @property
    def nbytes(self) -> int:
        """The bytes that stand now."""
        return self._storage.nbytes()

    def take(self) -> None:
        """Take the memory; values are to follow."""
        self._storage.resize_(self._bytes)

    def give_back(self) -> None:
        """Give the memory back; views stay, without values."""
        self._storage.resize_(0)
