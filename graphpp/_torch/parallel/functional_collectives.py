"""The private names of torch for collectives that autograd knows and that stand in a captured graph.

Checked on torch 2.13.0 and 2.15.0: `torch.distributed._functional_collectives`

- `all_to_all_single_autograd`: rank r of a group gets the r-th part of every rank's tensor along dimension 0
- `all_gather_single_autograd`: all ranks' tensors joined along a dimension; torch without this name has the older name
  `all_gather_tensor_autograd` for the same function
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part r of dimension 0 of every rank's tensor on rank r, in order of rank; the parts have equal sizes."""
    found: torch.Tensor = functional.all_to_all_single_autograd(tensor.contiguous(), None, None, group)
    return found


def all_gather(tensor: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks joined along a dimension, in order of rank; they have equal shapes."""
    found: torch.Tensor = _gather(tensor.contiguous(), dimension, group)
    return found
