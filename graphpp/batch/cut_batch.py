"""Cut a batch into microbatches along its batch dimension.

Contract
--------
- The batch size is the first dimension that most tensors of the batch have; on a tie, the first in order. Tensors wrapped in
  `graphpp.whole` do not count, nor do tensors with the same shape as in the example microbatch, if one was given. If all
  tensors have their example shape, the tensors that were cut in the latest batch count.
- A tensor whose first dimension is the batch size is cut along it, in order, into equal pieces. If the size does not divide,
  the last piece is smaller, or larger where a smaller one would be empty. Every other argument goes whole to each microbatch.
  A tensor of the target must be cut or wrapped in `graphpp.whole`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, Whole
from graphpp.errors import BatchError

_BY_HAND = "step_microbatches([graphpp.Microbatch(...), ...])"


class BatchCutter:
    """Cuts the batches of one pipeline, and remembers which tensors it has cut. `example`: the example microbatch, if given."""

    def __init__(self, example: Microbatch | None = None) -> None:
        tensors = {} if example is None else FlatMicrobatch.of(example).tensors
        self._shapes = {path: leaf.shape for path, leaf in tensors.items()}
        self._cut: frozenset[str] | None = None  # the paths of the tensors that were cut in the latest batch
        self._tensors = frozenset[str]()  # the paths of all its tensors

    def cut(self, flat: FlatMicrobatch, microbatches: int) -> list[FlatMicrobatch]:
        """The microbatches of a flat batch. Raises `BatchError` if the batch is too small, or a tensor's cut is ambiguous."""
        flat = self._with_whole_tensors(flat, microbatches)
        size = batch_size(flat)
        sizes = microbatch_sizes(size, microbatches)
        is_cut = [_is_cut(path, leaf, size) for path, leaf in _pairs(flat)]
        if microbatches > 1:
            self._tensors = frozenset(path for path, leaf in _pairs(flat) if isinstance(leaf, torch.Tensor | Whole))
            self._cut = frozenset(path for path, cut in zip(flat.paths, is_cut, strict=True) if cut)
        leaves = zip(flat.values, is_cut, strict=True)
        columns = [leaf.split(sizes) if cut else [leaf] * len(sizes) for leaf, cut in leaves]
        pieces = [FlatMicrobatch(flat.spec, flat.paths, *each) for each in zip(zip(*columns, strict=True), sizes, strict=True)]
        if any(isinstance(leaf, Whole) for leaf in flat.values):
            pieces = [replace(FlatMicrobatch.of(piece.microbatch()), rows=piece.rows) for piece in pieces]
        first = {rows: piece for rows, piece in zip(reversed(sizes), reversed(pieces), strict=True)}
        for rows, piece in zip(sizes, pieces, strict=True):  # microbatches of equal rows share one signature
            piece.take_signature(first[rows].signature)
        return pieces

    def describe(self) -> str:
        """The tensors of the latest batch that were cut, and those that were passed whole."""
        if self._cut is None:
            return ""
        cut, whole = sorted(self._cut), sorted(self._tensors - self._cut)
        kept = f"; whole: {', '.join(whole)}" if whole else ""
        return f"cut along dimension 0: {', '.join(cut)}{kept}"

    def _with_whole_tensors(self, flat: FlatMicrobatch, microbatches: int) -> FlatMicrobatch:
        """Wrap in `Whole` tensors with their example shape; if all have it, those that were not cut in the latest batch."""
        if not self._shapes or microbatches == 1:
            return flat
        tensors = {path: leaf for path, leaf in flat.tensors.items() if leaf.dim()}
        same = {path for path, leaf in tensors.items() if leaf.shape == self._shapes.get(path)}
        if tensors and not same:
            return flat
        if same == set(tensors):
            if self._cut is None or not same & self._cut:
                raise BatchError(
                    "every tensor of this batch has the shape it has in example=, which is to be one microbatch, so nothing "
                    "could be cut. Give a whole batch to step(), or pass its parts yourself with " + _BY_HAND + "."
                )
            same -= self._cut
        values = [Whole(leaf) if path in same else leaf for path, leaf in _pairs(flat)]
        return FlatMicrobatch(flat.spec, flat.paths, tuple(values))


def microbatch_sizes(size: int, microbatches: int) -> list[int]:
    if size < microbatches:
        raise BatchError(
            f"a batch of {size} cannot be cut into {microbatches} microbatches. Give a larger batch, fewer microbatches, or "
            f"pass the parts yourself with {_BY_HAND}."
        )
    usual = -(-size // microbatches)
    if size <= usual * (microbatches - 1):
        usual = size // microbatches
    return [usual] * (microbatches - 1) + [size - usual * (microbatches - 1)]


def _pairs(flat: FlatMicrobatch) -> list[tuple[str, Any]]:
    return list(zip(flat.paths, flat.values, strict=True))


def leading_size(microbatch: FlatMicrobatch) -> int | None:
    """The microbatch's rows if it was cut out of a batch; else its `leading_size`."""
    return microbatch.leading_size if microbatch.rows is None else microbatch.rows


def batch_size(flat: FlatMicrobatch) -> int:
    """The batch size. Raises `BatchError` if no tensor has a batch dimension or the batch is empty."""
    size = leading_size(flat)
    if size is None:
        raise BatchError(f"the batch holds no tensor with a batch dimension: pass its parts with {_BY_HAND}.")
    if size == 0:
        raise BatchError("the batch is empty: its first tensor has 0 rows.")
    return size


def _is_cut(path: str, leaf: Any, size: int) -> bool:
    """Whether a leaf is cut. Raises `BatchError` for a target tensor with another first dimension."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return False
    if len(leaf) != size and path.startswith("target"):
        raise BatchError(
            f"{path} has first dimension {len(leaf)}, the batch has {size}: it cannot be told how to cut it. "
            "Reshape it to [batch, ...], or wrap it in graphpp.whole(...) if every microbatch needs all of it."
        )
    return len(leaf) == size
