"""Microbatches: what one is, its tensors by path, its signature, and how a batch is cut into them.

Contract
--------
- A tensor of a microbatch has a path: `args[0]`, `kwargs['mask']`, `target['labels']`.
- `signature` is equal for two microbatches exactly if one captured graph serves both: same structure, same shapes,
  strides and dtypes, same values of everything that is no tensor.
- `cut`: tensors whose first dimension is the batch's are cut along it; everything else goes whole to every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp import _torch_aot as aot
from graphpp.errors import BatchError


class _Tensor:
    """Stands where a tensor was, in a structure without its tensors."""

    def __repr__(self) -> str:
        return "<tensor>"


TENSOR = _Tensor()


@dataclass(frozen=True)
class Microbatch:
    """One call of the model: `loss(model(*args, **kwargs), target)`. Tensors may stand at any depth."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    def __post_init__(self) -> None:
        args = self.args if isinstance(self.args, tuple | list) else (self.args,)
        object.__setattr__(self, "args", tuple(args))
        object.__setattr__(self, "kwargs", dict(self.kwargs))


@dataclass(frozen=True)
class Whole:
    """Wraps an argument that has no batch dimension though its first dimension looks like one: never cut."""

    value: Any


def whole(value: Any) -> Whole:
    """Mark a tensor (or a structure of tensors) of a batch as having no batch dimension: every microbatch gets all of it."""
    return Whole(value)


def _flatten(batch: Microbatch) -> tuple[list[tuple[str, Any]], aot.TreeSpec]:
    tree = {"args": batch.args, "kwargs": batch.kwargs, "target": batch.target}
    pairs, spec = aot.tree_flatten_with_path(tree)
    return [(_path(keys), leaf) for keys, leaf in pairs], spec


def _path(keys: Sequence[Any]) -> str:
    """`args[0]` from the key path of torch's pytree."""
    text = aot.keystr(tuple(keys))
    head, _, rest = text.removeprefix("['").partition("']")
    return head + rest


def tensors(batch: Microbatch) -> dict[str, torch.Tensor]:
    """The tensors of a microbatch by path, in a fixed order."""
    return {path: leaf for path, leaf in _flatten(batch)[0] if isinstance(leaf, torch.Tensor)}


def rebuild(example: Microbatch, values: Sequence[torch.Tensor]) -> Microbatch:
    """The microbatch with `values` in place of its tensors (same order as `tensors`)."""
    pairs, spec = _flatten(example)
    remaining = iter(values)
    leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in pairs]
    return Microbatch(**aot.tree_unflatten(leaves, spec))


def signature(batch: Microbatch) -> tuple[Any, ...]:
    """What a captured graph depends on: structure, tensor shapes and dtypes, values of other leaves."""
    pairs, spec = _flatten(batch)
    leaves = tuple(
        (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (path, repr(leaf))
        for path, leaf in pairs
    )
    return (str(spec), leaves)


def cut(batch: Microbatch, microbatches: int) -> list[Microbatch]:
    """Cut a batch into `microbatches` equal parts along dimension 0.

    The batch size is the first dimension of the first tensor with one. Raises `BatchError` where it is not
    divisible, or where a tensor of the target has another first dimension.
    """
    pairs, spec = _flatten(batch)
    size = batch_size(batch)
    if size % microbatches:
        raise BatchError(
            f"a batch of {size} cannot be cut into {microbatches} equal microbatches. Give a batch size that is a "
            f"multiple of {microbatches}, or pass the parts yourself with step_microbatches([...])."
        )
    columns = [_parts(path, leaf, size, microbatches) for path, leaf in pairs]
    return [Microbatch(**aot.tree_unflatten(list(leaves), spec)) for leaves in zip(*columns, strict=True)]


def batch_size(batch: Microbatch) -> int:
    """The first dimension of the first tensor that has one; raises `BatchError` where there is none."""
    for _, leaf in _flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise BatchError("the batch holds no tensor with a batch dimension: pass its parts with step_microbatches([...]).")


def _parts(path: str, leaf: Any, size: int, microbatches: int) -> list[Any]:
    if isinstance(leaf, Whole):
        return [leaf.value] * microbatches
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return [leaf] * microbatches
    if leaf.shape[0] == size:
        return list(leaf.split(size // microbatches)) if size else [leaf] * microbatches
    if path.startswith("target"):
        raise BatchError(
            f"{path} has first dimension {leaf.shape[0]}, the batch has {size}: it cannot be told how to cut it. "
            "Reshape it to [batch, ...], or wrap it in graphpp.whole(...) if every microbatch needs all of it."
        )
    return [leaf] * microbatches
