"""Lend memory to tensors while initialising code touches them, so that no rank has the whole model in memory.

- `LentMemory.like(tensor, fqn)` is a tensor without memory. Inside the context, the first operator that takes the tensor
  allocates its memory; `give_back` frees all of it.
- Another rank's tensor starts unwritten (`unwritten.py`). An operator that reads it before one fills it raises `GraphPPError`;
  views and in-place changes do not count as reads. A copy of it, such as `tensor.float()`, is unwritten like the tensor.
- A parameter that `dp_shard` or `tp` shards (`ShardValues`) keeps this rank's part when freed; the next touch gathers the whole
  value. All ranks of the mesh must touch such parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from graphpp._torch.aot import DispatchMode
from graphpp._torch.pytree import tree_flatten
from graphpp.errors import GraphPPError
from graphpp.ownership.freed_memory import trim_after
from graphpp.ownership.unwritten import poison, poisoned
from graphpp.parallel.checksum import checksum
from graphpp.parallel.data_parallel import broadcast_
from graphpp.runtime.dtensors import part_of, slice_of, spread_tensor, whole_tensor
from graphpp.runtime.fsdp.sharded_parameters import RowsOverStages, ShardedParameters, SpreadParameters
from graphpp.runtime.released import like

_COPIES = ("_to_copy", "clone")
_FILLS = ("fill_", "zero_", "copy_")  # these, and random operators, overwrite their whole first argument


class ShardValues:
    """Parts of parameters that get values. `kept`: FQNs of completely written parts; `checksums`: of the values before
    sharding.
    """

    def __init__(
        self, sharded: ShardedParameters | SpreadParameters | RowsOverStages, replicas: dist.ProcessGroup | None
    ) -> None:
        """`replicas`: the ranks that take the values of the first of them; None: each rank keeps its own."""
        self.sharded, self._replicas = sharded, replicas
        self.kept, self.checksums = set[str](), dict[str, int]()

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.sharded

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's part of a whole parameter, some of which may be unwritten."""
        if self._replicas is not None:
            broadcast_([whole], self._replicas)
        part = spread_tensor(self.sharded.parameters[fqn])
        own = whole if part is None else slice_of(whole, part.spread)
        self.sharded.take(fqn, own)
        self.checksums[fqn] = checksum(own)
        self.kept.add(fqn)

    @torch.no_grad()
    def restore(self, fqn: str, whole: torch.Tensor) -> bool:
        """Gather a parameter's values into `whole` if `take` was called for it; returns whether it was."""
        if fqn in self.checksums:
            whole.copy_(whole_tensor(self.sharded.parameters[fqn]))
        return fqn in self.checksums


class LentMemory(DispatchMode):
    """The context. `shards`: the parameters whose parts this rank keeps; all others belong to other ranks."""

    def __init__(self, device: torch.device, shards: ShardValues | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._shards = device, shards
        self._lent: dict[torch.UntypedStorage, tuple[int, str, torch.Tensor]] = {}  # bytes, FQN and the tensor
        self._used: list[torch.UntypedStorage] = []
        self._filled: dict[torch.UntypedStorage, bool] = {}  # True: whole, False: in part
        self._copies: list[torch.UntypedStorage] = []  # of tensors that are in `_lent`, too

    def like(self, tensor: torch.Tensor, fqn: str) -> torch.Tensor:
        """A tensor with the class, shape, strides, dtype and attributes of `tensor`, without memory."""
        made = like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device))
        storage = made.untyped_storage()
        self._lent[storage] = storage.nbytes(), fqn, made
        storage.resize_(0)
        return made

    def give_back(self) -> None:
        """Free the memory of all tensors."""
        freed = sum(storage.nbytes() for storage in self._used)
        for storage in self._used:
            _, fqn, tensor = self._lent[storage]
            if self._shards is not None and fqn in self._shards:
                self._shards.take(fqn, tensor)
                if poisoned(part_of(tensor, self._shards.sharded.parameters[fqn])):
                    self._shards.kept.remove(fqn)
            if storage.resizable():  # not where a NumPy array shares the memory
                storage.resize_(0)
        self._used.clear()
        self._filled.clear()
        for storage in self._copies:
            del self._lent[storage]
        self._copies.clear()
        trim_after(freed if self._device.type == "cpu" else 0)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        copied = ""
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.untyped_storage() in self._lent:
                copied = self._lend(leaf, operator, changed=operator._schema.is_mutable and leaf is args[0])
        found = operator(*args, **(kwargs or {}))
        if copied:
            poison(found)
            self._lent[found.untyped_storage()] = found.untyped_storage().nbytes(), copied, found
            self._copies.append(found.untyped_storage())
        return found

    def _lend(self, tensor: torch.Tensor, operator: Any, *, changed: bool) -> str:
        """Allocate the memory of an operator's argument; returns its FQN if the operator copies it unwritten.

        `changed`: the operator changes it in place.
        """
        storage, name = tensor.untyped_storage(), operator.overloadpacket.__name__
        size, fqn, own = self._lent[storage]
        shards = self._shards if self._shards is not None and fqn in self._shards else None
        fills = changed and (name in _FILLS or torch.Tag.nondeterministic_seeded in operator.tags)
        if size and not storage.nbytes():
            storage.resize_(size)
            self._used.append(storage)
            if shards is None or (fills and tensor.nbytes == size) or not shards.restore(fqn, own):
                poison(own)
        whole = self._filled.get(storage)
        if fills:
            self._filled[storage] = whole or tensor.nbytes == size
            return ""
        unwritten = shards is None and not changed and (whole is None or (not whole and poisoned(tensor)))
        if unwritten and not _is_blank(operator, name) and name not in _COPIES:
            raise GraphPPError(
                f"{name} takes values from {fqn}, which another rank holds and this call has not written: tie the parameters, "
                "or write the tensor first in the same call"
            )
        return fqn if unwritten and name in _COPIES else ""


def _is_blank(operator: Any, name: str) -> bool:
    """Whether an operator reads no values: it makes a view, or new memory of the same kind."""
    return operator.is_view or name.startswith("new_") or name.endswith("_like")
