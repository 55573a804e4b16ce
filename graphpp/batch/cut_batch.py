"""Cut a batch into microbatches along the batch dimensions of its tensors (`batch_dims.py`).

Contract
--------
- Tensors wrapped in `graphpp.whole` go whole, and so do tensors without a given dimension that have the same shape as in the
  example microbatch, if one was given. If all tensors have their example shape, those cut in the latest batch are cut.
- A tensor is cut along its batch dimension, in order, as `torch.chunk` cuts, or as `torch.tensor_split` where `torch.chunk`
  makes fewer pieces. Pieces along another dimension than 0 are copies in their own memory, so that their strides do not depend
  on the batch. Every other argument goes whole to each microbatch; a tensor of the target only if it is said to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpp.batch.batch_dims import BatchDims, shared
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, Whole, unwrapped
from graphpp.errors import BatchError

BY_NAME = "microbatches=graphpp.Microbatches(batch_dims={...})"
_BY_HAND = "step_microbatches([graphpp.Microbatch(...), ...])"


class BatchCutter:
    """Cuts the batches of one pipeline, and remembers which tensors it has cut. `example`: the example microbatch, if given."""

    def __init__(self, example: Microbatch | None = None, dims: BatchDims | None = None) -> None:
        tensors = {} if example is None else FlatMicrobatch.of(example).tensors
        self._shapes = {path: leaf.shape for path, leaf in tensors.items()}
        self._dims = dims or BatchDims()
        self._cut: frozenset[str] | None = None  # the paths of the tensors that were cut in the latest batch
        self._described = ""
        self.guesses = False  # whether only the size of a first dimension let a tensor of the latest batch go whole

    def rows(self, flat: FlatMicrobatch) -> int:
        """The rows of a batch. Raises `BatchError` if no tensor has a batch dimension or the batch is empty."""
        rows, _ = self._dims.of_tensors(flat)
        if rows is None:
            raise BatchError(f"the batch holds no tensor with a batch dimension: pass its parts with {_BY_HAND}.")
        if rows == 0:
            raise BatchError("the batch is empty: its first tensor has 0 rows.")
        return rows

    def cut(self, flat: FlatMicrobatch, microbatches: int) -> list[FlatMicrobatch]:
        """The microbatches of a flat batch. Raises `BatchError` if the batch is too small, or a tensor's cut is ambiguous."""
        flat = self._with_whole_tensors(flat, microbatches)
        sizes, (_, dims) = microbatch_sizes(self.rows(flat), microbatches), self._dims.of_tensors(flat)
        if microbatches > 1:
            self._note(flat, dims)
        columns = [_pieces(leaf, dims.get(path), sizes) for path, leaf in flat.pairs]
        pairs = zip(zip(*columns, strict=True), sizes, strict=True)
        pieces = [unwrapped(FlatMicrobatch(flat.spec, flat.paths, *pair, shared(dims))) for pair in pairs]
        first = {rows: piece for rows, piece in zip(reversed(sizes), reversed(pieces), strict=True)}
        for rows, piece in zip(sizes, pieces, strict=True):  # microbatches of equal rows share one signature
            piece.take_signature(first[rows].signature)
        return pieces

    def describe(self) -> str:
        """The tensors of the latest batch that were cut, and those that were passed whole."""
        return self._described

    def _with_whole_tensors(self, flat: FlatMicrobatch, microbatches: int) -> FlatMicrobatch:
        """Wrap in `Whole` tensors with their example shape; if all have it, those that were not cut in the latest batch."""
        if not self._shapes or microbatches == 1:
            return flat
        tensors = {path: leaf for path, leaf in flat.tensors.items() if leaf.dim() and path not in flat.masks}
        same = {path for path, leaf in tensors.items() if leaf.shape == self._shapes.get(path)}
        if same == set(tensors) and (self._cut is None or not same & self._cut):
            if tensors and not any(map(self._dims.says, tensors)):
                raise BatchError(
                    "every tensor of this batch has the shape it has in example=, which is to be one microbatch, so nothing "
                    "could be cut. Give a whole batch to step(), or pass its parts yourself with " + _BY_HAND + "."
                )
            return flat
        if same == set(tensors) and self._cut is not None:
            same -= self._cut
        values = [Whole(leaf) if path in same and not self._dims.says(path) else leaf for path, leaf in flat.pairs]
        return replace(flat, values=tuple(values))

    def _note(self, flat: FlatMicrobatch, dims: Mapping[str, int | None]) -> None:
        """Note how a batch is cut. Raises `BatchError` for a tensor of the target that is not said to go whole."""
        guessed = [path for path, dim in dims.items() if dim is None and not self._dims.says(path)]
        wrong = next((path for path in guessed if path.startswith("target")), None)
        if wrong is not None:
            size, rows = len(flat.tensors[wrong]), self.rows(flat)
            raise BatchError(
                f"{wrong} has first dimension {size}, the batch has {rows}: it cannot be told how to cut it. Reshape it to "
                f"[batch, ...], name its batch dimension by {BY_NAME}, or wrap it in graphpp.whole(...) if every microbatch "
                "needs all of it."
            )
        self._cut, self.guesses = frozenset(path for path, dim in dims.items() if dim is not None), bool(guessed)
        along = sorted({dim for dim in dims.values() if dim is not None})
        cut = [f"along dimension {each}: {', '.join(sorted(path for path in dims if dims[path] == each))}" for each in along]
        whole = sorted(path for path, leaf in flat.pairs if isinstance(leaf, torch.Tensor | Whole) and path not in self._cut)
        self._described = f"cut {'; '.join(cut)}" + (f"; whole: {', '.join(whole)}" if whole else "")


def microbatch_sizes(size: int, microbatches: int) -> list[int]:
    if size < microbatches:
        raise BatchError(
            f"a batch of {size} cannot be cut into {microbatches} microbatches. Give a larger batch, fewer microbatches, or "
            f"pass the parts yourself with {_BY_HAND}."
        )
    usual, more = -(-size // microbatches), size % microbatches
    if size > usual * (microbatches - 1):
        return [usual] * (microbatches - 1) + [size - usual * (microbatches - 1)]
    return [usual] * more + [usual - 1] * (microbatches - more)


def _pieces(leaf: Any, dim: int | None, sizes: list[int]) -> Sequence[Any]:
    if dim is None:
        return [leaf] * len(sizes)
    return leaf.split(sizes, dim) if dim == 0 or len(sizes) == 1 else [piece.clone() for piece in leaf.split(sizes, dim)]
