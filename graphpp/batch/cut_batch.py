"""From a batch to its microbatches.

Contract
--------
- The batch's size is the first dimension that most of its tensors have (of equally many, the first one's); what is wrapped
  in `graphpp.whole` does not count. Nor does, where an example microbatch was given, a tensor of the example's very shape.
- Tensors with that first dimension are cut along it, in order, into equal parts, the last one smaller (or, where nothing
  would be left for it, larger) if the size does not divide; everything else goes whole to every microbatch. A tensor of the
  target must be cut or wrapped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, Whole
from graphpp.errors import BatchError

_BY_HAND = "step_microbatches([graphpp.Microbatch(...), ...])"


def cut_batch(batch: Microbatch, microbatches: int, example: Microbatch | None = None) -> list[FlatMicrobatch]:
    """The microbatches, taken apart; raises `BatchError` where the batch does not divide or it cannot be told how."""
    leaves = FlatMicrobatch.of(batch)
    if example is not None and microbatches > 1:
        leaves = _wrapped(leaves, example)
    size = _size(leaves)
    sizes = microbatch_sizes(size, microbatches)
    pairs = zip(leaves.paths, leaves.values, strict=True)
    columns = [_parts(path, leaf, sizes) for path, leaf in pairs]
    if not columns:
        return [leaves] * microbatches
    parts = [FlatMicrobatch(leaves.spec, leaves.paths, values) for values in zip(*columns, strict=True)]
    nested = any(isinstance(leaf, Whole) for leaf in leaves.values)
    return [FlatMicrobatch.of(part.microbatch()) for part in parts] if nested else parts


def microbatch_sizes(size: int, microbatches: int) -> list[int]:
    """How many rows each microbatch gets; raises `BatchError` where there are fewer rows than microbatches."""
    if size < microbatches:
        raise BatchError(
            f"a batch of {size} cannot be cut into {microbatches} microbatches. Give a larger batch, fewer microbatches, or "
            f"pass the parts yourself with {_BY_HAND}."
        )
    usual = -(-size // microbatches)
    if size <= usual * (microbatches - 1):
        usual = size // microbatches
    return [usual] * (microbatches - 1) + [size - usual * (microbatches - 1)]


def batch_size(batch: Microbatch) -> int:
    """The batch's size; raises `BatchError` where there is none, or nothing in it."""
    return _size(FlatMicrobatch.of(batch))


def _wrapped(leaves: FlatMicrobatch, example: Microbatch) -> FlatMicrobatch:
    """The batch with every tensor wrapped that has no more rows than in one microbatch."""
    one = {path: leaf.shape for path, leaf in FlatMicrobatch.of(example).tensors.items()}
    alike = [isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape == one.get(path) for path, leaf in _pairs(leaves)]
    if all(fits or not isinstance(leaf, torch.Tensor) for fits, (_, leaf) in zip(alike, _pairs(leaves), strict=True)):
        raise BatchError(
            "every tensor of this batch has the shape it has in example=, which is to be one microbatch, so nothing could be "
            "cut. Give a whole batch to step(), or pass its parts yourself with " + _BY_HAND + "."
        )
    values = [Whole(leaf) if fits else leaf for fits, (_, leaf) in zip(alike, _pairs(leaves), strict=True)]
    return FlatMicrobatch(leaves.spec, leaves.paths, tuple(values))


def _pairs(leaves: FlatMicrobatch) -> list[tuple[str, Any]]:
    return list(zip(leaves.paths, leaves.values, strict=True))


def leading_size(part: FlatMicrobatch) -> int | None:
    """The first dimension that most tensors have (of equally many, the first one's); None where none has any."""
    sizes = Counter(len(leaf) for leaf in part.values if isinstance(leaf, torch.Tensor) and leaf.dim())
    return sizes.most_common(1)[0][0] if sizes else None


def _size(leaves: FlatMicrobatch) -> int:
    size = leading_size(leaves)
    if size is None:
        raise BatchError(f"the batch holds no tensor with a batch dimension: pass its parts with {_BY_HAND}.")
    if size == 0:
        raise BatchError("the batch is empty: its first tensor has 0 rows.")
    return size


def _parts(path: str, leaf: Any, sizes: list[int]) -> list[Any]:
    size = sum(sizes)
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        if len(leaf) == size:
            return list(leaf.split(sizes))
        if path.startswith("target"):
            raise BatchError(
                f"{path} has first dimension {len(leaf)}, the batch has {size}: it cannot be told how to cut it. "
                "Reshape it to [batch, ...], or wrap it in graphpp.whole(...) if every microbatch needs all of it."
            )
    return [leaf] * len(sizes)
