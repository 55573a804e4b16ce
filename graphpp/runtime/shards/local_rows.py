"""Tensors that are spread over ranks, as `DTensor`s: this rank's part, whole values, copies.

Contract
    A tensor that `dp_shard` has sharded has the placement `Shard(0)` over the last dimension of its mesh, or `Replicate()` if
    the tensor is 0-dim. Each rank has `ceil(rows / ranks)` rows, the last ones fewer or none. Functions take plain tensors
    too, which are whole.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp._torch.parallel.sharded_tensor import Spread, gathered, local_of, spread_of
from graphpp.errors import GraphPPError

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


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, if `like` is a `DTensor`, as a view; a `DTensor` gives its own part.

    Raises `GraphPPError` for a `DTensor` that is spread in another way.
    """
    spread, other = spread_of(like), spread_of(whole)
    if other is not None:
        if spread is None or other.mesh != spread.mesh or other.placements != spread.placements:
            raise GraphPPError(
                "a DTensor of another mesh or other placements cannot be copied into a parameter: give the whole tensor, "
                "tensor.full_tensor(), or load a checkpoint, which fits every mesh"
            )
        return local_tensor(whole)
    return whole if spread is None else slice_of(whole, spread)


def slice_of(whole: torch.Tensor, spread: Spread) -> torch.Tensor:
    """This rank's part of a tensor of which the rank has all values, as a view."""
    found = whole
    for at, placement in enumerate(spread.placements):
        if placement.is_shard():
            rows = rows_of(found.shape[placement.dim], spread.mesh.size(at), spread.mesh.get_local_rank(at))
            found = found.narrow(placement.dim, rows.start, len(rows))
    return found


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole values, without autograd. Called by all ranks of a sharded tensor's mesh."""
    return gathered(tensor.detach())
