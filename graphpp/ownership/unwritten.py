"""Mark memory as unwritten, so that a tensor without values is refused by name.

The mark is NaN in floating-point numbers, one rare value in integers of four and eight bytes, and a byte that is neither True
nor False in booleans. Shorter integers have no spare value: such a tensor counts as written once an operator changed it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from graphpp.errors import GraphPPError
from graphpp.runtime.model_state import own_tensors

_PIECE = 2**20  # elements checked at once
_NO_BOOL = 0xAA
_RARE = 1_234_567  # above the least integer


@torch.no_grad()
def poison(tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.view(torch.uint8).fill_(_NO_BOOL)
    elif _has_fractions(tensor):
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(0 if tensor.itemsize <= 2 else torch.iinfo(tensor.dtype).min + _RARE)


def poisoned(tensor: torch.Tensor) -> bool:
    """Whether an element is unwritten since `poison`."""
    if tensor.itemsize <= 2 and not _has_fractions(tensor) and tensor.dtype is not torch.bool:
        return tensor.numel() > 0 and tensor._version <= 1
    return any(bool(_marks(piece).any()) for piece in tensor.detach().flatten().split(_PIECE))


def _marks(piece: torch.Tensor) -> torch.Tensor:
    if piece.dtype is torch.bool:
        return piece.view(torch.uint8) == _NO_BOOL
    if _has_fractions(piece):
        return (piece.float() if piece.itemsize == 1 else piece).isnan()
    return piece == torch.iinfo(piece.dtype).min + _RARE


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def check_written(model: nn.Module, tensors: Mapping[str, torch.Tensor], advice: str) -> None:
    """Raise `GraphPPError` with the FQNs of tensors that have an unwritten element."""
    left = [fqn for fqn, tensor in tensors.items() if tensor.is_meta or poisoned(tensor)]
    if left:
        owners = {id(tensor): module for module in model.modules() for _, tensor in own_tensors(module)}
        named = [f"{fqn} of a {type(owners.get(id(tensors[fqn]))).__name__}" for fqn in left[:3]]
        raise GraphPPError(f"{len(left)} tensors have no values, or NaN: {', '.join(named)}. {advice}")
