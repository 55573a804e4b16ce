"""Cut a batch into microbatches along its batch dimension.

Contract
--------
- The batch size is the first dimension that most tensors of the batch have; of equally frequent ones, the first in order.
  Arguments wrapped in `graphpp.whole` do not count. If an example microbatch was given, neither do tensors that have exactly
  the shape that they have in the example; if all tensors have, those count that were cut in the latest batch.
- A tensor whose first dimension is the batch size is cut along it, in order, into equal pieces. If the size does not divide,
  the last piece is smaller, or larger where a smaller one would be empty. Every other argument goes whole to each microbatch.
  A tensor of the target must be cut or wrapped in `graphpp.whole`.
- How a batch is cut depends on its structure and layout alone, but where an example decides: such a batch, and one with a
  wrapped argument, is looked at anew each time; for any other the cutter keeps a recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpp._torch.pytree import TreeSpec, is_plain
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, Structure, Whole
from graphpp.errors import BatchError

_RECIPES = 64  # most layouts of batches that a cutter keeps
_BY_HAND = "step_microbatches([graphpp.Microbatch(...), ...])"


@dataclass(frozen=True)
class _Recipe:
    """How batches of one layout are cut: the rows and the signature of each microbatch, and which leaves are cut.

    `cut`, `tensors`: the paths of the tensors that are cut, and of all tensors.
    """

    sizes: list[int]
    signatures: list[tuple[str, ...]]
    is_cut: tuple[bool, ...]
    cut: frozenset[str]
    tensors: frozenset[str]

    @classmethod
    def of(cls, flat: FlatMicrobatch, pieces: Sequence[FlatMicrobatch]) -> _Recipe:
        """The recipe by which a batch was cut into `pieces`."""
        sizes = [leading_size(piece) or 0 for piece in pieces]
        is_cut = tuple(_is_cut(leaf, sum(sizes)) for leaf in flat.values)
        cut = frozenset(path for path, each in zip(flat.paths, is_cut, strict=True) if each)
        return cls(sizes, [piece.signature for piece in pieces], is_cut, cut, frozenset(flat.tensors))


class BatchCutter:
    """Cuts the batches of one pipeline, and remembers which tensors it has cut.

    `example`: the microbatch whose shapes the pipeline was given, or None.
    """

    def __init__(self, example: Microbatch | None = None) -> None:
        tensors = {} if example is None else FlatMicrobatch.of(example).tensors
        self._shapes = {path: leaf.shape for path, leaf in tensors.items()}
        self._structure: Structure | None = None  # the structure of the latest batch
        self._recipes: tuple[TreeSpec, dict[tuple[int, tuple[Any, ...]], _Recipe]] | None = None  # by number and layout
        self._cut: frozenset[str] | None = None  # the paths of the tensors that were cut in the latest batch
        self._tensors = frozenset[str]()  # the paths of all tensors of that batch

    def flat(self, batch: Microbatch) -> FlatMicrobatch:
        """A batch as flat leaves. Raises `BatchError` for leaves that hide tensors."""
        found = FlatMicrobatch.of(batch, self._structure)
        self._structure = found.structure if is_plain(found.spec) else None
        return found

    def cut(self, flat: FlatMicrobatch, microbatches: int) -> list[FlatMicrobatch]:
        """The microbatches of a flat batch. Raises `BatchError` if it is too small, or if it is unclear how to cut a tensor."""
        if any(isinstance(leaf, Whole) for leaf in flat.values) or not is_plain(flat.spec):
            return self._cut_anew(self._with_whole_tensors(flat, microbatches), microbatches)
        known, batch = self._recipes, (microbatches, flat.layout)
        if known is None or known[0] != flat.spec or len(known[1]) > _RECIPES:
            known = self._recipes = flat.spec, {}
        recipe = known[1].get(batch)
        if recipe is not None:
            return self._cut_by(recipe, flat)
        marked = self._with_whole_tensors(flat, microbatches)
        pieces = self._cut_anew(marked, microbatches)
        if marked is flat:  # the marks depend on the batch before, too
            known[1][batch] = _Recipe.of(flat, pieces)
        return pieces

    def _cut_by(self, recipe: _Recipe, flat: FlatMicrobatch) -> list[FlatMicrobatch]:
        """The microbatches of a batch of a layout that was cut before."""
        sizes = recipe.sizes
        if len(sizes) > 1:
            self._tensors, self._cut = recipe.tensors, recipe.cut
        leaves = zip(flat.values, recipe.is_cut, strict=True)
        columns = [leaf.split(sizes) if cut else [leaf] * len(sizes) for leaf, cut in leaves]
        pieces = [FlatMicrobatch(flat.spec, flat.paths, *each) for each in zip(zip(*columns, strict=True), sizes, strict=True)]
        for piece, signature in zip(pieces, recipe.signatures, strict=True):
            piece.take_signature(signature)
        return pieces

    def _cut_anew(self, flat: FlatMicrobatch, microbatches: int) -> list[FlatMicrobatch]:
        """The microbatches of a batch of another layout than before."""
        sizes = microbatch_sizes(batch_size(flat), microbatches)
        columns = [_pieces(path, leaf, sizes) for path, leaf in _pairs(flat)]
        if microbatches > 1:
            self._tensors = frozenset(path for path, leaf in _pairs(flat) if isinstance(leaf, torch.Tensor | Whole))
            self._cut = frozenset(path for path, leaf in _pairs(flat) if _is_cut(leaf, sum(sizes)))
        rows_and_values = zip(sizes, zip(*columns, strict=True), strict=True)
        pieces = [FlatMicrobatch(flat.spec, flat.paths, values, rows) for rows, values in rows_and_values]
        if any(isinstance(leaf, Whole) for leaf in flat.values):
            pieces = [replace(FlatMicrobatch.of(piece.microbatch()), rows=piece.rows) for piece in pieces]
        signatures = {piece.rows: piece.signature for piece in (pieces[0], pieces[-1])}
        for piece in pieces:  # pieces of as many rows have one signature
            piece.take_signature(signatures[piece.rows])
        return pieces

    def describe(self) -> str:
        """The tensors of the latest batch that were cut along their first dimension, and those that were passed whole."""
        if self._cut is None:
            return ""
        cut, whole = sorted(self._cut), sorted(self._tensors - self._cut)
        kept = f"; whole: {', '.join(whole)}" if whole else ""
        return f"cut along dimension 0: {', '.join(cut)}{kept}"

    def _with_whole_tensors(self, flat: FlatMicrobatch, microbatches: int) -> FlatMicrobatch:
        """The batch with each tensor wrapped in `Whole` that has the same shape as in the example; itself if none has.

        Of a batch in which all tensors have, as a short last batch may, the tensors that were not cut in the latest batch.
        """
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
    """The number of rows of each microbatch. Raises `BatchError` if there are fewer rows than microbatches."""
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
    """The rows of a microbatch that was cut out of a batch; else its `leading_size`."""
    return microbatch.leading_size if microbatch.rows is None else microbatch.rows


def batch_size(flat: FlatMicrobatch) -> int:
    """The batch size. Raises `BatchError` if no tensor has a batch dimension, or if the batch is empty."""
    size = leading_size(flat)
    if size is None:
        raise BatchError(f"the batch holds no tensor with a batch dimension: pass its parts with {_BY_HAND}.")
    if size == 0:
        raise BatchError("the batch is empty: its first tensor has 0 rows.")
    return size


def _pieces(path: str, leaf: Any, sizes: list[int]) -> list[Any]:
    """The argument at `path` for each microbatch: cut into `sizes` rows, or whole."""
    size = sum(sizes)
    if _is_cut(leaf, size):
        return list(leaf.split(sizes))
    if isinstance(leaf, torch.Tensor) and leaf.dim() and path.startswith("target"):
        raise BatchError(
            f"{path} has first dimension {len(leaf)}, the batch has {size}: it cannot be told how to cut it. "
            "Reshape it to [batch, ...], or wrap it in graphpp.whole(...) if every microbatch needs all of it."
        )
    return [leaf] * len(sizes)


def _is_cut(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size
