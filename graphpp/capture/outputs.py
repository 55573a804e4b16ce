"""Merge the microbatches' outputs of an evaluation into the model's output, and average metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp.batch.batch_dims import BatchDims
from graphpp.batch.microbatch import TENSOR_LEAF, FlatMicrobatch, is_plain_data
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import BatchError, CaptureError
from graphpp.runtime import program


class _UnseenError(CaptureError, AttributeError):
    """So `hasattr` of an unseen object is False: trainers ask each value of an output for its dtype."""


@dataclass(frozen=True)
class Unseen:
    """Takes the place of an object in the output that hides tensors from torch's pytree; its use raises `CaptureError`."""

    kind: str

    def refuse(self, *_: object) -> Any:
        if self.kind.endswith("Cache"):
            remedy = "Hugging Face models leave it out with use_cache=False, as an argument or in model.config."
        else:
            remedy = "Return the tensors in a tuple, list or dict, or register its class with torch.export.register_dataclass."
        raise _UnseenError(f"the model's output holds a {self.kind}, and torch cannot see what is in it. {remedy}")

    __getitem__ = __iter__ = __len__ = __call__ = refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse()


def with_unseen(captured: CapturedGraph) -> CapturedGraph:
    """The graph with `Unseen` objects in the output. Raises `CaptureError` if it has one, and neither a tensor nor a loss."""
    leaves = [
        leaf if leaf is TENSOR_LEAF or is_plain_data(leaf) else Unseen(type(leaf).__qualname__)
        for leaf in captured.output_leaves
    ]
    unseen = next((leaf for leaf in leaves if isinstance(leaf, Unseen)), None)
    seen = any(leaf is TENSOR_LEAF for leaf in leaves)
    if unseen is not None and not seen and not any(isinstance(role, program.Loss) for role, _ in captured.joint.outputs()):
        unseen.refuse()
    return replace(captured, output_leaves=tuple(leaves))


def joined_dims(
    captured: CapturedGraph,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    parts: Sequence[FlatMicrobatch],
    dims: BatchDims,
) -> list[int | None]:
    """For each output the dimension along which the microbatches' are joined, None without any; `shapes`: per microbatch.

    Raises `BatchError` if outputs cannot be joined.
    """
    found = list[int | None]()
    for path, each in zip(_output_paths(captured), zip(*shapes, strict=True), strict=True):
        pairs = zip(each, parts, strict=True)
        along = {dims.of_output(path, shape, part.rows, parts[0].dim) for shape, part in pairs}
        found.append(along.pop() if len(along) == 1 else None)
        shown, dim = " and ".join(map(str, dict.fromkeys(each))), found[-1]
        if dim is None and len(set(each)) > 1:
            raise BatchError(
                f"the model's {path} has the shapes {shown} for the microbatches, and no batch dimension in front or named in "
                "microbatches.batch_dims: it cannot be put together. Evaluate a batch that divides evenly."
            )
        if dim is not None and len({shape[:dim] + shape[dim + 1 :] for shape in each}) > 1:
            raise BatchError(
                f"the model's {path} has the shapes {shown} for the microbatches: it cannot be put together. Pad them alike, "
                "evaluate each by itself, or leave memory.outputs out."
            )
    return found


def _output_paths(captured: CapturedGraph) -> list[str]:
    """The path of each tensor, such as `output['logits']`; `output[0]` by its place where its class tells no paths."""
    leaves, spec = captured.output_leaves, captured.output_spec
    assert spec is not None
    try:
        pairs, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))
    except Exception:  # of a class that was registered without paths, or whose objects hold tensors only
        return [f"output[{at}]" for at, leaf in enumerate(leaf for leaf in leaves if leaf is TENSOR_LEAF)]
    return [f"output{pytree.keystr(keys)}" for keys, leaf in pairs if leaf is TENSOR_LEAF]


def output_shapes(captured: CapturedGraph) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for role, node in captured.joint.outputs() if isinstance(role, program.Output)]


def merge_outputs(
    captured: CapturedGraph, outputs: Sequence[Mapping[int, torch.Tensor]], parts: Sequence[FlatMicrobatch], dims: BatchDims
) -> Any:
    """The model's output for the whole batch. `outputs`: per microbatch, tensors by index. `parts`: the microbatches."""
    columns = list(zip(*([value for _, value in sorted(output.items())] for output in outputs), strict=True))
    shapes = [[tuple(value.shape) for value in row] for row in zip(*columns, strict=True)] or [[] for _ in outputs]
    joined = joined_dims(captured, shapes, parts, dims)
    merged = iter([_merge_leaf(values, dim) for values, dim in zip(columns, joined, strict=True)])
    leaves = [next(merged) if leaf is TENSOR_LEAF else leaf for leaf in captured.output_leaves]
    assert captured.output_spec is not None
    return pytree.tree_unflatten(leaves, captured.output_spec)


def _merge_leaf(values: Sequence[torch.Tensor], dim: int | None) -> torch.Tensor:
    """Merge one output: joined along its batch dimension, averaged if 0-dim and floating, else stacked."""
    if len(values) == 1:
        return values[0]
    if dim is not None:
        return torch.cat(list(values), dim)
    stacked = torch.stack(list(values))
    return stacked.mean() if stacked.dim() == 1 and stacked.is_floating_point() else stacked
