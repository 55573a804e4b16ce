"""Results put back together: an evaluation's outputs from the leaves of its microbatches, reported numbers averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpp._torch import aot
from graphpp.batch.microbatch import TENSOR_LEAF, is_plain_data
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import BatchError, CaptureError
from graphpp.runtime import program


def check_output_leaves(captured: CapturedGraph) -> None:
    """Raise `CaptureError` where the model's output hides tensors from torch's pytree: they could not be given back."""
    for leaf in captured.output_leaves:
        if leaf is not TENSOR_LEAF and not is_plain_data(leaf):
            kind = type(leaf).__qualname__
            raise CaptureError(
                f"the model's output holds a {kind}, and torch cannot see what is in it. {_remedy(leaf)}"
            )


def check_mergeable(captured: Sequence[CapturedGraph], sizes: Sequence[int | None]) -> None:
    """Raise `BatchError` where the outputs of microbatches of several shapes cannot be put together; `sizes` are their rows."""
    shapes = [_output_shapes(each) for each in captured]
    for index, each in enumerate(zip(*shapes, strict=True)):
        rows = all(shape and shape[0] == size for shape, size in zip(each, sizes, strict=True))
        if not rows and len(set(each)) > 1:
            found = " and ".join(map(str, dict.fromkeys(each)))
            raise BatchError(
                f"the model's output {index} has the shapes {found} for the microbatches, "
                "and no batch dimension in front: it cannot be put together. Evaluate a batch that divides evenly."
            )


def _output_shapes(captured: CapturedGraph) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for role, node in captured.joint.outputs() if isinstance(role, program.Output)]


def _remedy(leaf: object) -> str:
    if type(leaf).__name__.endswith("Cache"):
        return "Hugging Face models leave it out with use_cache=False, as an argument or in model.config."
    return "Return the tensors in a tuple, list or dict, or register its class with torch.export.register_dataclass."


def merge_outputs(
    captured: CapturedGraph, outputs: Sequence[Mapping[int, torch.Tensor]], sizes: Sequence[int | None]
) -> Any:
    """The model's output for the whole batch from its leaves per microbatch; `sizes` are the microbatches' batch sizes."""
    leaves: list[Any] = []
    index = 0
    for leaf in captured.output_leaves:
        if leaf is TENSOR_LEAF:
            leaves.append(_merge_leaf([part[index] for part in outputs], sizes))
            index += 1
        else:
            leaves.append(leaf)
    assert captured.output_spec is not None
    return aot.tree_unflatten(leaves, captured.output_spec)


def _merge_leaf(parts: list[torch.Tensor], sizes: Sequence[int | None]) -> torch.Tensor:
    """Of one microbatch as it is; joined along the batch dimension; a 0-dim floating value averaged; others stacked."""
    if len(parts) == 1:
        return parts[0]
    if all(part.dim() and len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return torch.cat(parts)
    stacked = torch.stack(parts)
    return stacked.mean() if stacked.dim() == 1 and stacked.is_floating_point() else stacked


def mean_metrics(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each number's mean over the microbatches; counts and flags as float32."""
    return {name: (each if each.is_floating_point() else each.float()).mean() for name, each in metrics.items()}
