"""Gradient norms and clipping over all ranks, bit-equal to torch's on the whole model in one process.

Contract: a rank computes the norms of its own parameters, an all-reduce gives every rank all norms in the model's order, and
the total is their norm, computed as in `torch.nn.utils.clip_grad_norm_`. A parameter that several ranks hold counts once.
Every rank returns the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

from graphpp._torch.distributed import foreach_norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of this rank, its position in the model's order, and whether its norm is counted on this rank."""

    position: int
    parameter: torch.Tensor
    counts: bool


@dataclass(frozen=True)
class RankGradients:
    """The gradients of this rank's parameters, in the model's order; `positions`: how many parameters the model has."""

    own: Sequence[OwnParameter]
    positions: int
    group: dist.ProcessGroup | None
    device: torch.device

    def present(self) -> list[torch.Tensor]:
        """The gradients that are not None."""
        return [each.parameter.grad for each in self.own if each.parameter.grad is not None]


@dataclass(frozen=True)
class PendingNorms:
    """The all-reduce of the norms of all parameters; `table` is complete once `total` has returned."""

    table: torch.Tensor
    norm_type: float
    work: dist.Work | None

    def arrived(self) -> bool:
        """Whether the all-reduce is complete, so that `total` would not wait."""
        return self.work is None or self.work.is_completed()

    def total(self) -> torch.Tensor:
        """Wait for the all-reduce; the norm of all gradients, 0-dim."""
        if self.work is not None:
            self.work.wait()
        return total_of(self.table, self.norm_type)


def total_norm(gradients: RankGradients, norm_type: float) -> torch.Tensor:
    """The norm of all gradients of the model (0-dim, on this rank's device)."""
    return all_reduce_(own_norms(gradients, norm_type), norm_type, gradients.group).total()


def own_norms(gradients: RankGradients, norm_type: float) -> torch.Tensor:
    """The norms that this rank counts, float64 [2, positions]: the norm, and 1 + the index of its dtype (0: no gradient)."""
    counted = [(each.position, each.parameter.grad) for each in gradients.own if each.counts]
    present = [(position, grad) for position, grad in counted if grad is not None]
    table = torch.zeros(2, gradients.positions, dtype=torch.float64, device=gradients.device)
    for dtype in {grad.dtype for _, grad in present}:
        same_dtype = [(position, grad) for position, grad in present if grad.dtype is dtype]
        norms = foreach_norm([grad for _, grad in same_dtype], norm_type)
        for (position, _), norm in zip(same_dtype, norms, strict=True):
            table[0, position], table[1, position] = norm, 1 + _DTYPES.index(dtype)
    return table


def all_reduce_(table: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None) -> PendingNorms:
    """Start the all-reduce of the ranks' tables, in place."""
    several = group is not None and dist.get_world_size(group) > 1
    return PendingNorms(table, norm_type, dist.all_reduce(table, group=group, async_op=True) if several else None)


def total_of(table: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of the norms in a table, 0-dim."""
    return _total(table[0], table[1].int(), norm_type)


def _total(norms: torch.Tensor, codes: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of the norms, joined in the order and the dtype of `torch.nn.utils.get_total_norm`."""
    seen = [code for code in dict.fromkeys(codes.tolist()) if code]
    if not seen:
        return torch.tensor(0.0, device=norms.device)
    dtype = reduce(torch.promote_types, (_DTYPES[code - 1] for code in seen))
    # torch groups the norms by dtype, and the dtype that appears last comes first.
    joined = torch.cat([norms[codes == code] for code in reversed(seen)])
    total: torch.Tensor = torch.linalg.vector_norm(joined.to(dtype), norm_type)
    return total


def share_overflow_(gradients: RankGradients) -> None:
    """Give every rank an infinite gradient if any rank has one that is not finite: each rank's own scaler then finds it."""
    found = overflow(gradients).to(torch.int32)
    if gradients.group is not None and dist.get_world_size(gradients.group) > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=gradients.group)
    mark_overflow_(gradients, found)


def overflow(gradients: RankGradients) -> torch.Tensor:
    """Whether a gradient of this rank is not finite: bool, 0-dim, on its device."""
    mine = [gradient for gradient in gradients.present() if gradient.numel()]
    finite = [norm.isfinite().to(gradients.device) for norm in (foreach_norm(mine, math.inf) if mine else [])]
    return ~torch.stack(finite).all() if finite else torch.tensor(False, device=gradients.device)


def mark_overflow_(gradients: RankGradients, found: torch.Tensor) -> None:
    """Where `found` is above 0, make the first number of every gradient of this rank infinite.

    In every gradient, because the parameters may belong to several optimizers, which the scaler checks one by one.
    """
    for gradient in gradients.present():
        if gradient.numel():
            first = (0,) * gradient.dim()
            gradient[first] = torch.where(found.to(gradient.device) > 0, math.inf, gradient[first])


def clip_(gradients: RankGradients, max_norm: float, norm: torch.Tensor) -> None:
    """Scale this rank's gradients by max_norm / norm where the norm is larger, as torch does."""
    torch.nn.utils.clip_grads_with_norm_([each.parameter for each in gradients.own], max_norm, norm)


def clips(max_norm: float, norm: torch.Tensor) -> bool:
    """Whether `clip_` would change a gradient; also true if the norm is not finite. Waits for the norm's device."""
    probe = torch.zeros((), dtype=torch.float64, device=norm.device)
    probe.grad = torch.ones_like(probe)
    torch.nn.utils.clip_grads_with_norm_([probe], max_norm, norm)
    return not bool(probe.grad == 1)
