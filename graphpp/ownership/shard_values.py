"""Values for spread parameters from code that initialises a model, or from files: whole for a moment, parts for good.

Contract
--------
- `ShardValues.keep(fqn, whole)` copies this rank's rows of a parameter, after which the whole values may go. `restore`
  brings them back, for code that touches a parameter twice. So a rank needs memory for its shards and a few whole parameters.
- All ranks of the mesh call these methods in the same order: `restore` gathers, and `take` and `keep` take the values of the
  first replica, where the replicas begin with these.
- `kept` has the parameters of which every element of this rank's rows was written: after `take` all, after `keep` those that
  no mark shows to be unwritten (`borrowed_memory.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from graphpp.ownership.borrowed_memory import poisoned
from graphpp.parallel.checksum import checksum
from graphpp.parallel.data_parallel import broadcast_
from graphpp.runtime.shards.local_rows import part_of, slice_of, whole_tensor
from graphpp.runtime.shards.sharded_parameters import ShardedParameters
from graphpp.runtime.shards.spread_parameters import SpreadParameters
from graphpp.runtime.shards.spread_tensors import spread_tensor


class ShardValues:
    """The values of parameters that have none yet, and that `dp_shard`, `tp` or both spread over ranks."""

    def __init__(self, sharded: ShardedParameters | SpreadParameters, replicas: dist.ProcessGroup | None) -> None:
        """`replicas`: the ranks that take the values of the first of them; None: each rank keeps its own."""
        self.sharded, self._replicas = sharded, replicas
        self.kept = set[str]()
        self.checksums: dict[str, int] = {}  # of whole parameters
        self._touched = set[str]()

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.sharded

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a parameter, or of the part that `tp` leaves the rank."""
        if self._replicas is not None:
            broadcast_([whole], self._replicas)
        part = spread_tensor(self.sharded.parameters[fqn])
        own = whole if part is None else slice_of(whole, part.spread)
        self.sharded.take(fqn, own)
        self.checksums[fqn] = checksum(own)
        self._touched.add(fqn)
        self.kept.add(fqn)

    def keep(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a parameter, some of which may be unwritten."""
        self.take(fqn, whole)
        if poisoned(part_of(whole, self.sharded.parameters[fqn])):
            self.kept.remove(fqn)

    def restore(self, fqn: str, whole: torch.Tensor) -> bool:
        """Gather the values of a parameter into `whole`, if `keep` has had some."""
        if fqn in self._touched:
            with torch.no_grad():
                whole.copy_(whole_tensor(self.sharded.parameters[fqn]))
        return fqn in self._touched
