"""Results put back together: an evaluation's outputs from the leaves of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpp import _torch_aot as aot
from graphpp import signature
from graphpp.capture import Captured


def merge_outputs(captured: Captured, outputs: Sequence[Mapping[int, torch.Tensor]], size: int) -> Any:
    """The model's output for the whole batch from the leaves per microbatch; `size` is a microbatch's batch dimension."""
    leaves: list[Any] = []
    index = 0
    for leaf in captured.output_leaves:
        if leaf is signature.TENSOR:
            leaves.append(_merged([part[index] for part in outputs], size))
            index += 1
        else:
            leaves.append(leaf)
    assert captured.output_spec is not None
    return aot.tree_unflatten(leaves, captured.output_spec)


def _merged(parts: list[torch.Tensor], size: int) -> torch.Tensor:
    """Joined along the batch dimension; a 0-dim floating value averaged; others stacked."""
    if parts[0].dim() and parts[0].shape[0] == size:
        return torch.cat(parts)
    stacked = torch.stack(parts)
    return stacked.mean() if stacked.dim() == 1 and stacked.is_floating_point() else stacked
