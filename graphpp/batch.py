"""From a batch to its microbatches.

Contract
--------
- The batch's size is the first dimension that most of its tensors have (of equally many, the first one's); what is wrapped
  in `graphpp.whole` does not count. Nor does, where an example microbatch was given, a tensor of the example's very shape.
- Tensors with that first dimension are cut along it into equal parts, in order; everything else goes whole to every
  microbatch. A tensor of the target must be cut or wrapped.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from graphpp.errors import BatchError
from graphpp.signature import Leaves, Microbatch, Whole

_BY_HAND = "step_microbatches([graphpp.Microbatch(...), ...])"


def cut(batch: Microbatch, microbatches: int, example: Microbatch | None = None) -> list[Leaves]:
    """The microbatches, taken apart; raises `BatchError` where the batch does not divide or it cannot be told how."""
    leaves = Leaves.of(batch)
    if example is not None and microbatches > 1:
        leaves = _wrapped(leaves, example)
    size = _size(leaves)
    if size % microbatches:
        raise BatchError(
            f"a batch of {size} cannot be cut into {microbatches} equal microbatches. Give a batch size that is a "
            f"multiple of {microbatches}, or pass the parts yourself with {_BY_HAND}."
        )
    pairs = zip(leaves.paths, leaves.values, strict=True)
    columns = [_parts(path, leaf, size, microbatches) for path, leaf in pairs]
    if not columns:
        return [leaves] * microbatches
    parts = [Leaves(leaves.spec, leaves.paths, values) for values in zip(*columns, strict=True)]
    nested = any(isinstance(leaf, Whole) for leaf in leaves.values)
    return [Leaves.of(part.microbatch()) for part in parts] if nested else parts


def batch_size(batch: Microbatch) -> int:
    """The batch's size; raises `BatchError` where there is none, or nothing in it."""
    return _size(Leaves.of(batch))


def _wrapped(leaves: Leaves, example: Microbatch) -> Leaves:
    """The batch with every tensor wrapped that has no more rows than in one microbatch."""
    one = {path: leaf.shape for path, leaf in Leaves.of(example).tensors.items()}
    alike = [isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape == one.get(path) for path, leaf in _pairs(leaves)]
    if all(fits or not isinstance(leaf, torch.Tensor) for fits, (_, leaf) in zip(alike, _pairs(leaves), strict=True)):
        raise BatchError(
            "every tensor of this batch has the shape it has in example=, which is to be one microbatch, so nothing could be "
            "cut. Give a whole batch to step(), or pass its parts yourself with " + _BY_HAND + "."
        )
    values = [Whole(leaf) if fits else leaf for fits, (_, leaf) in zip(alike, _pairs(leaves), strict=True)]
    return Leaves(leaves.spec, leaves.paths, tuple(values))


def _pairs(leaves: Leaves) -> list[tuple[str, Any]]:
    return list(zip(leaves.paths, leaves.values, strict=True))


def leading_size(part: Leaves) -> int | None:
    """The first dimension that most tensors have (of equally many, the first one's); None where none has any."""
    sizes = Counter(len(leaf) for leaf in part.values if isinstance(leaf, torch.Tensor) and leaf.dim())
    return sizes.most_common(1)[0][0] if sizes else None


def same_shape(parts: list[Leaves]) -> None:
    """Raise `BatchError` unless one captured graph serves all microbatches; names the first other one and its leaf."""
    if not parts:
        raise BatchError("a step needs at least one microbatch, got an empty list")
    usual = parts[0].signature
    for index, part in enumerate(parts):
        if part.signature != usual:
            pairs = zip(part.signature, usual, strict=False)
            mine, first = next((pair for pair in pairs if pair[0] != pair[1]), ("more", "fewer"))
            raise BatchError(
                f"microbatch {index} differs from microbatch 0: it has {mine}, microbatch 0 has {first}. Pad the "
                "microbatches of one step to one shape, or run them in steps of their own."
            )


def _size(leaves: Leaves) -> int:
    size = leading_size(leaves)
    if size is None:
        raise BatchError(f"the batch holds no tensor with a batch dimension: pass its parts with {_BY_HAND}.")
    if size == 0:
        raise BatchError("the batch is empty: its first tensor has 0 rows.")
    return size


def _parts(path: str, leaf: Any, size: int, microbatches: int) -> list[Any]:
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        if len(leaf) == size:
            return list(leaf.split(size // microbatches))
        if path.startswith("target"):
            raise BatchError(
                f"{path} has first dimension {len(leaf)}, the batch has {size}: it cannot be told how to cut it. "
                "Reshape it to [batch, ...], or wrap it in graphpp.whole(...) if every microbatch needs all of it."
            )
    return [leaf] * microbatches
