"""Work around a double free in gloo's coalesced all-gather. Importing this file replaces two CPU operators of torch.

`all_gather_into_tensor` and `all_gather_into_tensor_coalesced` of `_c10d_functional` give the same results as torch's. For CPU
tensors of a gloo group, each tensor is gathered by its own call; other groups run torch's kernels.

Both of torch's operators call `ProcessGroup.allgather_into_tensor_coalesced`. The two threads of a gloo group write the name of
their last collective into one string without a lock. A name of more than 15 characters, such as `ALLGATHER_COALESCED`, is
on the heap, and both threads may free it: 4 of 7 runs of 20 s crashed on torch 2.13.0 and 2.15.0.

Private names of torch, checked on 2.13.0 and 2.15.0: `torch.ops._c10d_functional`: these two operators, and
`all_gather_into_tensor_out`, which calls `ProcessGroup._allgather_base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named, runs_on_gloo

_OPERATORS = torch.ops._c10d_functional


def _over_gloo(group: str | dist.ProcessGroup) -> bool:
    found = group if isinstance(group, dist.ProcessGroup) else group_named(group)
    return runs_on_gloo(found, torch.device("cpu"))


def _alone(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    own = part.contiguous()
    whole = own.new_empty((ranks * own.shape[0], *own.shape[1:]))
    found: torch.Tensor = _OPERATORS.all_gather_into_tensor_out(own, ranks, group, out=whole)
    return found


def _gather(keys: Any, part: torch.Tensor, ranks: int, group: str) -> Any:
    return _alone(part, ranks, group) if _over_gloo(group) else _ONE.call_boxed(keys, part, ranks, group)


def _gather_several(keys: Any, parts: Sequence[torch.Tensor], ranks: int, group: str) -> Any:
    if _over_gloo(group):
        return [_alone(each, ranks, group) for each in parts]
    return _SEVERAL.call_boxed(keys, parts, ranks, group)


_ONE, _SEVERAL = (
    torch.library.get_kernel(each.default, "CPU")
    for each in (_OPERATORS.all_gather_into_tensor, _OPERATORS.all_gather_into_tensor_coalesced)
)  # torch's own
_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")  # its kernels are unregistered when this object dies
_LIBRARY.impl("all_gather_into_tensor", _gather, "CPU", with_keyset=True)
_LIBRARY.impl("all_gather_into_tensor_coalesced", _gather_several, "CPU", with_keyset=True)
