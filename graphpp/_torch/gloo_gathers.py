"""All-gathers of tensors on the CPU that leave gloo's memory whole: importing this file changes operators of torch.

Contract: `all_gather_into_tensor` and `all_gather_into_tensor_coalesced` of `_c10d_functional` give the same results as before.
On the CPU each tensor is gathered by a call of its own.

Both operators of torch call `ProcessGroup.allgather_into_tensor_coalesced`. The two threads of a gloo group write the name of
the collective that they completed last into one string, without a lock. A name of up to 15 characters stands in the string
itself. `ALLGATHER_COALESCED` has memory of its own, which both threads free: sooner or later a process with another collective
under way dies of a double free, seen in 4 of 7 runs of 20 s on torch 2.13.0 and 2.15.0.

Private names of torch, checked on 2.13.0 and 2.15.0:

- `torch.ops._c10d_functional`: its two operators, for which torch has no kernel of the CPU's own, and
  `all_gather_into_tensor_out`, which calls `ProcessGroup._allgather_base`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def _gathered(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    own = part.contiguous()
    whole = own.new_empty((ranks * own.shape[0], *own.shape[1:]))
    found: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(own, ranks, group, out=whole)
    return found


def _all_gathered(parts: Sequence[torch.Tensor], ranks: int, group: str) -> list[torch.Tensor]:
    return [_gathered(each, ranks, group) for each in parts]


if dist.is_available():
    KERNELS = torch.library.Library("_c10d_functional", "IMPL")  # the kernels are there as long as this object
    KERNELS.impl("all_gather_into_tensor", _gathered, "CPU")
    KERNELS.impl("all_gather_into_tensor_coalesced", _all_gathered, "CPU")
