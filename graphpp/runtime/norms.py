"""Gradient norms and clipping over all ranks, bit-equal to torch's on the whole model in one process.

Contract: each parameter's norm is computed where the parameter is, the norms are joined in the model's order on every rank,
and the total is taken from them as `torch.nn.utils.clip_grad_norm_` does. A parameter that several ranks hold counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphpp.runtime._torch_pipelining import foreach_norm


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
    norms = foreach_norm([grad for _, grad in present], norm_type) if present else []
    table = torch.zeros(2, places, dtype=torch.float64, device=device)
    for (place, _), norm in zip(present, norms, strict=True):
        table[0, place], table[1, place] = norm, 1
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(table, group=group)
    held = table[0][table[1] > 0]
    if not held.numel():
        return torch.tensor(0.0, device=device)
    dtype = norms[0].dtype if norms else torch.float32
    return torch.linalg.vector_norm(held.to(dtype), norm_type)


def clip_(slots: Sequence[Slot], max_norm: float, norm: torch.Tensor) -> None:
    """Scale this rank's gradients by max_norm / norm where the norm is larger, as torch does."""
    torch.nn.utils.clip_grads_with_norm_([slot.parameter for slot in slots], max_norm, norm)
