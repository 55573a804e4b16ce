"""The private names of torch for differentiable collectives in a captured graph.

Checked on torch 2.13.0 and 2.15.0: `torch.distributed._functional_collectives`: `all_to_all_single_autograd`;
`all_gather_single_autograd` and `reduce_scatter_single_autograd`, whose older names are `all_gather_tensor_autograd` and
`reduce_scatter_tensor_autograd`
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_scatter = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all along dimension 0 in equal parts: rank r gets part r of every rank's tensor, in order of rank."""
    found: torch.Tensor = functional.all_to_all_single_autograd(tensor.contiguous(), None, None, group)
    return found


def all_gather(tensor: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather of tensors of equal shapes, joined along a dimension in order of rank."""
    found: torch.Tensor = _gather(tensor.contiguous(), dimension, group)
    return found


def reduce_scatter(tensor: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks, of which rank r gets part r of equal parts along a dimension."""
    found: torch.Tensor = _scatter(tensor.contiguous(), "sum", dimension, group)
    return found
