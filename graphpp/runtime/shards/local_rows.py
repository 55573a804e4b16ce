"""Sharded tensors as `DTensor`s: this rank's rows, whole values, copies.

Contract
    A sharded tensor is a `DTensor` over a mesh of one dimension with the placement `Shard(0)`, or `Replicate()` if it is 0-dim.
    Each rank has `ceil(rows / ranks)` rows, the last ones fewer or none. Functions take plain tensors too, which are whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp._torch.parallel.sharded_tensor import dtensor_of, local_of, mesh_of
from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SHARDED = WeakTensorKeyDictionary()  # the parameters that are views of flat shards


def rows_of(rows: int, ranks: int, rank: int) -> range:
    """The rows that one of `ranks` ranks holds of a tensor with `rows` rows."""
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return range(first, min(first + each, rows))


def note_sharded(parameter: torch.Tensor) -> None:
    """Note that a pipeline has made this parameter as a view of a flat shard."""
    _SHARDED[parameter] = True


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a pipeline has made this parameter as a view of a flat shard."""
    return tensor in _SHARDED


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without autograd; a plain tensor itself."""
    local = local_of(tensor)
    return tensor if local is None else local.detach()


def as_sharded(local: torch.Tensor, mesh: DeviceMesh, like: torch.Tensor, stride: tuple[int, ...] | None = None) -> Any:
    """A `DTensor` of the shape of `like`, of which `local` is this rank's part; contiguous, or with other strides."""
    shape = like.shape
    return dtensor_of(local, mesh, shape, torch.empty(shape, device="meta").stride() if stride is None else stride)


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's rows of `whole`, if `like` is sharded; a `DTensor` gives its own part.

    Raises `GraphPPError` for a `DTensor` that is spread in another way.
    """
    mesh, other = mesh_of(like), mesh_of(whole)
    if other is not None and other != mesh:
        raise GraphPPError(
            "a DTensor of another mesh cannot be copied into a parameter: give the whole tensor, tensor.full_tensor(), or load "
            "a checkpoint, which fits every mesh"
        )
    if mesh is None or not like.dim():
        return local_tensor(whole)
    if other is not None:
        found = local_tensor(whole)
        if found.shape != local_tensor(like).shape:
            raise GraphPPError("a DTensor of other placements cannot be copied into a parameter: give tensor.full_tensor()")
        return found
    rows = rows_of(like.shape[0], mesh.size(), mesh.get_local_rank())
    return whole[rows.start : rows.stop]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole values, without autograd. Called by all ranks of a sharded tensor's mesh."""
    return tensor.detach() if mesh_of(tensor) is None else tensor.detach().full_tensor()  # type: ignore[attr-defined]
