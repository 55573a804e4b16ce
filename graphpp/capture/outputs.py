"""Merge the microbatches' outputs of an evaluation into the model's output, and average metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp.batch.microbatch import TENSOR_LEAF, is_plain_data
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import BatchError, CaptureError
from graphpp.runtime import program


def check_output_leaves(captured: CapturedGraph) -> None:
    """Raise `CaptureError` if an object in the model's output hides tensors from torch's pytree."""
    for leaf in captured.output_leaves:
        if leaf is not TENSOR_LEAF and not is_plain_data(leaf):
            kind = type(leaf).__qualname__
            raise CaptureError(
                f"the model's output holds a {kind}, and torch cannot see what is in it. {_remedy(leaf)}"
            )


def check_mergeable(shapes: Sequence[Sequence[tuple[int, ...]]], sizes: Sequence[int | None]) -> None:
    """Raise `BatchError` if outputs of these `shapes`, per microbatch, cannot be merged; `sizes`: their batch sizes."""
    for index, each in enumerate(zip(*shapes, strict=True)):
        rows = all(shape and shape[0] == size for shape, size in zip(each, sizes, strict=True))
        if not rows and len(set(each)) > 1:
            found = " and ".join(map(str, dict.fromkeys(each)))
            raise BatchError(
                f"the model's output {index} has the shapes {found} for the microbatches, "
                "and no batch dimension in front: it cannot be put together. Evaluate a batch that divides evenly."
            )


def output_shapes(captured: CapturedGraph) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for role, node in captured.joint.outputs() if isinstance(role, program.Output)]


def _remedy(leaf: object) -> str:
    if type(leaf).__name__.endswith("Cache"):
        return "Hugging Face models leave it out with use_cache=False, as an argument or in model.config."
    return "Return the tensors in a tuple, list or dict, or register its class with torch.export.register_dataclass."


def merge_outputs(
    captured: CapturedGraph, outputs: Sequence[Mapping[int, torch.Tensor]], sizes: Sequence[int | None]
) -> Any:
    """The model's output for the whole batch. `outputs`: per microbatch, tensors by index. `sizes`: their batch sizes."""
    leaves: list[Any] = []
    index = 0
    for leaf in captured.output_leaves:
        if leaf is TENSOR_LEAF:
            leaves.append(_merge_leaf([output[index] for output in outputs], sizes))
            index += 1
        else:
            leaves.append(leaf)
    assert captured.output_spec is not None
    return pytree.tree_unflatten(leaves, captured.output_spec)


def _merge_leaf(values: list[torch.Tensor], sizes: Sequence[int | None]) -> torch.Tensor:
    """Merge one output: concatenated along the batch dimension, averaged if 0-dim and floating, else stacked."""
    if len(values) == 1:
        return values[0]
    if all(value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    stacked = torch.stack(values)
    return stacked.mean() if stacked.dim() == 1 and stacked.is_floating_point() else stacked


def mean_metrics(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean of each metric over the microbatches, 0-dim; integers and bools are averaged as float32."""
    return {name: (each if each.is_floating_point() else each.float()).mean() for name, each in metrics.items()}
