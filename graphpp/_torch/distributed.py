"""The private names of torch for ranks, norms, copies and memory; importing this file imports nothing more than torch.

Checked on torch 2.13.0 and 2.15.0, the first two also on 2.11.0:

- `torch._foreach_norm`, `torch._foreach_copy_`, `torch._neg_view`
- `torch._C._construct_storage_from_data_pointer`: CUDA memory at an address, which is not freed with the storage
- `torch._C._cuda_endAllocateToPool`: a capture that CUDA refused leaves its pool open, and the next capture would be refused
- `torch.distributed.distributed_c10d._get_default_store`: the key-value store that all ranks share
- `distributed_c10d._resolve_process_group`: a process group by the name that a collective in a graph has
- `distributed_c10d._new_process_group_helper`, `_world.pg_group_ranks`, `_world.pg_names.items`: a process group with a name, a
  connection to the store and an order of ranks of its own; `dist.new_group` sorts ranks, and counts the groups of the process
- `distributed_c10d._get_split_source`: the communicator from which NCCL would split one, a message on the world group
- `distributed_c10d._set_pg_timeout`, `ProcessGroup._get_backend`, `options._timeout`; torch 2.15 has `dist.set_timeout`
- `Store.clone`: a second connection to the same store (missing from torch's stubs)
- `ProcessGroup.allgather_into_tensor_coalesced`: several all-gathers in one call; not on gloo (`gloo_gathers.py`)
- `ProcessGroup._allgather_base`, `ProcessGroup.reduce_scatter_tensor_coalesced`: torch renamed the public functions
  between 2.11 and 2.13, and warns about the old names
- `torch.distributed.nn.functional`: default arguments have the world group of the module's first import, which keeps it alive
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch._C._distributed_c10d import Store as Store
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group  # type: ignore[attr-defined]

from graphpp._torch.this_thread import replaced

default_store = _get_default_store
foreach_norm = torch._foreach_norm
foreach_copy = torch._foreach_copy_
group_named: Callable[[Any], dist.ProcessGroup] = _resolve_process_group


for _function in vars(torch.distributed.nn.functional).values():  # None also means the world group, the current one
    if isinstance(_function, FunctionType) and _function.__defaults__:
        _kept = (None if isinstance(each, dist.ProcessGroup) else each for each in _function.__defaults__)
        _function.__defaults__ = tuple(_kept)


_ALONE = 2**16  # bytes of a rank's part; larger tensors are gathered over gloo one by one, without a copy


def runs_on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return f"{device.type}:gloo" in dist.get_backend_config(group)


def all_gather_many(
    gathered: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Start an all-gather of each tensor of `parts` into the tensor of `gathered` at the same index."""
    whole, own = ([each.view(-1).view(torch.uint8) for each in tensors] for tensors in (gathered, parts))
    if len(own) == 1:
        return group._allgather_base(whole[0], own[0])
    if not runs_on_gloo(group, own[0].device):
        work: dist.Work = group.allgather_into_tensor_coalesced(whole, own)
        return work
    pairs = list(zip(whole, own, strict=True))
    works = [group._allgather_base(*pair) for pair in pairs if pair[1].numel() >= _ALONE]
    small = [pair for pair in pairs if pair[1].numel() < _ALONE]
    return _Several([*works, _Packed(small, group)] if small else works)


class _Several(dist.Work):
    """Waits for several works in order. A caller may only call `wait`."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all([work.wait(timeout) for work in self._works])


class _Packed(dist.Work):
    """Packs all-gathers of small tensors into one, which `wait` unpacks. A caller may only call `wait`."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup) -> None:
        """`pairs`: (gathered tensor, this rank's part)."""
        super().__init__()
        self._whole, sent = [whole for whole, _ in pairs], torch.cat([own for _, own in pairs])
        self._arrived = sent.new_empty(group.size(), sent.numel())
        self._work: dist.Work | None = group._allgather_base(self._arrived.view(-1), sent)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait(timeout)
            ranks = len(self._arrived)
            pieces = self._arrived.split([each.numel() // ranks for each in self._whole], dim=1)
            foreach_copy([each.view(ranks, -1) for each in self._whole], list(pieces))
            self._work = None
            del self._arrived
        return True


def reduce_scatter(part: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter (sum) of `parts`, the concatenated parts of all ranks, into this rank's `part`."""
    work: dist.Work = group.reduce_scatter_tensor_coalesced([part], [parts])
    return work


def group_of(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, store: Store
) -> dist.ProcessGroup:
    """A new process group of world ranks in this order, which all of them make. `store`: a connection of its own."""
    with replaced(distributed_c10d, "_get_split_source", lambda _: None):
        make: Callable[..., tuple[dist.ProcessGroup, Store]] = distributed_c10d._new_process_group_helper
        made, _ = make(len(ranks), ranks.index(dist.get_rank()), list(ranks), backend, store, name, timeout=timeout)
    distributed_c10d._world.pg_group_ranks[made] = {rank: at for at, rank in enumerate(ranks)}
    return made


def open_groups() -> dict[str, dist.ProcessGroup]:
    """The process groups of this process by name, without those that were destroyed."""
    return {name: group for group, name in distributed_c10d._world.pg_names.items()}


def own_connection(store: Store) -> Store:
    """A second connection to the store, for another thread to use while `store` waits."""
    found: Store = store.clone()  # type: ignore[attr-defined]
    return found


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    public = getattr(dist, "set_timeout", None)
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    device = torch.device("cpu" if "cpu:gloo" in dist.get_backend_config(group) else "cuda")
    try:
        options = group._get_backend(device).options
    except RuntimeError:  # a process group written in Python has no backends
        options = None
    return default_pg_timeout if options is None else options._timeout


def without_owning(value: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of a CUDA tensor, which does not keep the memory allocated."""
    held = value.untyped_storage()
    if not held.nbytes():
        return value
    storage: Any = torch._C._construct_storage_from_data_pointer(held.data_ptr(), value.device, held.nbytes())
    return over(storage, value)


def close_pool(pool: tuple[int, int]) -> None:
    """Let a memory pool serve the next capture, after one of the current device that failed."""
    with suppress(RuntimeError):  # it is closed already
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """The tensor that lies in a storage as `like` lies in its own."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    made.set_(storage, like.storage_offset(), like.shape, like.stride())
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made
