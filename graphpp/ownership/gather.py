"""The whole model's state dict on one rank, sent by the ranks that hold its parts.

Contract
    Every rank goes through the same entries in the order of the model's state dict. The holder of an entry sends, and the
    receiver keeps a copy in the host's memory; an entry under a second key is sent once. An entry that no rank's stage reads
    has the same value everywhere. On the way a rank has one entry more than it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.shards.local_rows import whole_tensor


def keys_of(names: str | Sequence[str], known: Mapping[str, object]) -> list[str]:
    """The keys that are asked for, in the model's order. Raises `GraphPPError` for one that the model's state dict lacks."""
    if names == "all":
        return list(known)
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise GraphPPError(f"names: the model's state dict has no entry {unknown[0]!r}; take its keys, or 'all'")
    return [key for key in known if key in set(wanted)]


def gathered(
    entries: Mapping[str, torch.Tensor], holders: Mapping[int, int], place: RankPlace, rank: int | None
) -> dict[str, torch.Tensor]:
    """Copies of `entries` on `rank` of the pipeline (None: on every rank); {} elsewhere.

    `entries`: the tensors of the model by key, or their stand-ins; `holders`: the rank that holds a tensor, by its `id`.
    """
    distinct = {id(tensor): tensor for tensor in entries.values()}
    copies = {key: _passed(tensor, holders.get(key), place, rank) for key, tensor in distinct.items()}
    found = {key: copies[id(tensor)] for key, tensor in entries.items()}
    return {key: copy for key, copy in found.items() if copy is not None}


def _passed(tensor: torch.Tensor, holder: int | None, place: RankPlace, rank: int | None) -> torch.Tensor | None:
    """Send or receive one tensor; the copy on a rank that receives, else None."""
    receives = rank is None or rank == place.rank
    if holder is None or place.group is None or (rank is not None and holder == rank):
        return whole_tensor(tensor).to("cpu", copy=True) if receives else None
    if place.rank == holder:
        sent = whole_tensor(tensor).contiguous()
        _bytes_pass(sent, holder, place, rank)
        return sent.to("cpu", copy=True) if receives else None
    if not receives:
        return None
    arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
    _bytes_pass(arrived, holder, place, rank)
    return arrived.cpu()


def _bytes_pass(tensor: torch.Tensor, holder: int, place: RankPlace, rank: int | None) -> None:
    flat = tensor.view(-1).view(torch.uint8)  # gloo does not know all dtypes
    if not flat.numel():
        return
    if rank is None:
        dist.broadcast(flat, group=place.group, group_src=holder)
    elif place.rank == holder:
        dist.send(flat, group=place.group, group_dst=rank)
    else:
        dist.recv(flat, group=place.group, group_src=holder)
