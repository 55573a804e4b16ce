"""Gradient norms and clipping over all ranks, bit-equal to torch's on the whole model in one process.

Contract: each parameter's norm is computed where the parameter is, the norms are joined in the model's order on every
rank, and the total is taken from them as `torch.nn.utils.clip_grad_norm_` does. A parameter that several ranks hold
counts once. Every rank returns the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

from graphpp.runtime._torch_pipelining import foreach_norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Slot:
    """A parameter this rank holds: its place in the model's order, and whether this rank is the one that counts it."""

    place: int
    parameter: torch.Tensor
    counts: bool


def total_norm(
    slots: Sequence[Slot], places: int, norm_type: float, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """The norm of all gradients of the model (0-dim, on `device`); `places` is the number of the model's parameters."""
    counted = [(slot.place, slot.parameter.grad) for slot in slots if slot.counts]
    present = [(place, grad) for place, grad in counted if grad is not None]
    table = torch.zeros(
        2, places, dtype=torch.float64, device=device
    )  # norm, and 1 + index of its dtype (0: no gradient)
    for dtype in {grad.dtype for _, grad in present}:
        group_of = [(place, grad) for place, grad in present if grad.dtype is dtype]
        norms = foreach_norm([grad for _, grad in group_of], norm_type)
        for (place, _), norm in zip(group_of, norms, strict=True):
            table[0, place], table[1, place] = norm, 1 + _DTYPES.index(dtype)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(table, group=group)
    return _total(table[0], table[1].int(), norm_type)


def _total(norms: torch.Tensor, codes: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of the norms, in the dtype and the order in which torch stacks them."""
    seen = [code for code in dict.fromkeys(codes.tolist()) if code]
    if not seen:
        return torch.tensor(0.0, device=norms.device)
    dtype = reduce(torch.promote_types, (_DTYPES[code - 1] for code in seen))
    # torch groups by dtype and comes to the dtype that it met last first.
    joined = torch.cat([norms[codes == code] for code in reversed(seen)])
    total: torch.Tensor = torch.linalg.vector_norm(joined.to(dtype), norm_type)
    return total


def share_overflow_(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Where any rank has a gradient that is not finite, let every rank have one: each rank's own inf check finds it."""
    mine = [gradient for gradient in gradients if gradient.numel()]
    norms = foreach_norm(mine, math.inf) if mine else []
    finite = [norm.isfinite().to(device) for norm in norms]
    found = (~torch.stack(finite).all() if finite else torch.tensor(False, device=device)).to(torch.int32)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    for gradient in mine:  # every one: parameters may be shared out among optimizers, each with a check of its own
        first = (0,) * gradient.dim()
        gradient[first] = torch.where(found.to(gradient.device) > 0, math.inf, gradient[first])


def clip_(slots: Sequence[Slot], max_norm: float, norm: torch.Tensor) -> None:
    """Scale this rank's gradients by max_norm / norm where the norm is larger, as torch does."""
    torch.nn.utils.clip_grads_with_norm_([slot.parameter for slot in slots], max_norm, norm)
