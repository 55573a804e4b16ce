"""Tensors that are spread over ranks as `DTensor`s: by the model itself over `tp`, `ep` or `etp`, or by FSDP over `dp_shard`.

- After `parallelize_module` the parameters and buffers of a model are `DTensor`s. A rank computes with the local tensor, and
  the graphs of a pipeline have local tensors in place of the model's `DTensor`s (`spread_tensor`).
- A tensor that replaces such a `DTensor` in the model, because another rank has the stage or `dp_shard` cuts the local tensor,
  keeps the placements of the original, and the shape of the local tensor.
- A tensor that `dp_shard` has sharded has the placement `Shard(0)` over the last dimension of its mesh (`Replicate()` if
  0-dim). All functions take plain tensors too, which are whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp._torch.parallel.sharded_tensor import Spread, gathered, local_of, spread_of
from graphpp.errors import GraphPPError
from graphpp.parallel.mesh import TENSOR
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.parameter_rows import rows_in, rows_of

_SHARDED = WeakTensorKeyDictionary()  # the parameters that a pipeline has made as rows of the model's
_OVER_STAGES = WeakTensorKeyDictionary()  # those of them that have other rows on each rank of a pipeline


def note_sharded(parameter: torch.Tensor) -> None:
    _SHARDED[parameter] = True


def note_over_stages(parameter: torch.Tensor) -> None:
    """Note that a pipeline has put this `DTensor` in place of a parameter, with `Shard(0)` over the pipeline's ranks."""
    note_sharded(parameter)
    _OVER_STAGES[parameter] = True


def any_over_stages() -> bool:
    return len(_OVER_STAGES) > 0


def is_over_stages(tensor: torch.Tensor) -> bool:
    return tensor in _OVER_STAGES


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a pipeline has made this parameter, as rows of the model's own."""
    return tensor in _SHARDED


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without autograd; a plain tensor itself."""
    local = local_of(tensor)
    return tensor if local is None else local.detach()


def value_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The local values, detached, of the model's tensor that `name` means, or of some of its rows."""
    rows = rows_in(name)
    local = local_tensor(tensor).detach()
    return local if rows is None else local[rows.start : rows.stop]


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, as a view, if `like` is a `DTensor`; a `whole` that is a `DTensor` gives its local tensor.

    Raises `GraphPPError` for a `DTensor` of another mesh or other placements than `like`.
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
    """This rank's part of a tensor whose values are all on this rank, as a view."""
    found = whole
    for at, placement in enumerate(spread.placements):
        if placement.is_shard():
            rows = rows_of(found.shape[placement.dim], spread.mesh.size(at), spread.mesh.get_local_rank(at))
            found = found.narrow(placement.dim, rows.start, len(rows))
    return found


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole values, without autograd. All ranks of a sharded tensor's mesh call this."""
    return gathered(tensor.detach())


class SpreadTensor(NamedTuple):
    """How a tensor is spread over the ranks that share its layer; `local` has the shape and strides of this rank's part."""

    spread: Spread
    local: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Whether each of these ranks has the whole tensor."""
        return all(placement.is_replicate() for placement in self.spread.placements)


_KEPT = WeakTensorKeyDictionary()  # a tensor in the place of a `DTensor` of the model's -> its `SpreadTensor`


def spread_tensor(tensor: torch.Tensor) -> SpreadTensor | None:
    """How the model spreads a tensor over ranks, and this rank's part; None for a tensor that each rank has whole."""
    kept: SpreadTensor | None = _KEPT.get(tensor)
    if kept is not None or is_sharded(tensor):
        return kept
    spread, local = spread_of(tensor), local_of(tensor)
    return None if spread is None or local is None else SpreadTensor(spread, local.detach())


def is_spread_over(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether the model gives each rank of `group` another part of a tensor; None: a group of this rank alone."""
    part = spread_tensor(tensor)
    if part is None or part.is_whole or group is None:
        return False
    return part.spread.mesh.mesh.flatten().tolist() == dist.get_process_group_ranks(group)


def is_expert(tensor: torch.Tensor, place: RankPlace) -> bool:
    """Whether ranks have other experts in a tensor. `ep` may have the very ranks of `tp`, which cuts layers by its own mesh."""
    part = spread_tensor(tensor)
    if part is None or not is_spread_over(tensor, place.experts_group):
        return False
    return part.spread.mesh.ndim == len(place.expert_dims) and part.spread.mesh.mesh_dim_names != (TENSOR,)


def is_cut_along(tensor: torch.Tensor, dim: int) -> bool:
    """Whether the model gives each rank along a dimension of the tensor's mesh another part."""
    part = spread_tensor(tensor)
    return part is not None and bool(part.spread.placements[dim].is_shard())


def keep_part(stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
    """Note that `stand_in` replaces `tensor` in the model."""
    part = spread_tensor(tensor)
    if part is not None:
        blank = torch.empty_strided(part.local.shape, part.local.stride(), dtype=part.local.dtype, device="meta")
        _KEPT[stand_in] = SpreadTensor(part.spread, blank)


def local_gradient(fqn: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of `parameter.grad`. Raises `GraphPPError` for a gradient with other placements than the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    own, found = spread_of(parameter), spread_of(gradient)
    if (own and own[:2]) != (found and found[:2]):
        raise GraphPPError(
            f"the gradient of {fqn} has the placements {found and found.placements}, and the parameter has "
            f"{own and own.placements}: a step adds to gradients with the placements of their parameters. Call "
            "pipe.zero_grad() before, or redistribute the gradient"
        )
    return local_tensor(gradient)


def refuse_spread(model: nn.Module, remedy: str) -> None:
    """Raise `GraphPPError`, with the remedy, for a parameter or buffer that the model spreads over ranks."""
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        part = spread_tensor(tensor)
        if part is not None:
            raise GraphPPError(f"{fqn} is a DTensor with placements {part.spread.placements}, and {remedy}")
