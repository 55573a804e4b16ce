"""The batch dimension of each tensor of a call, and of the model's outputs.

Contract
--------
- A tensor's batch dimension is the one that `microbatches.batch_dims` gives it (None: it goes whole), else dimension 0 where
  its size is the number of rows, else none.
- The rows are the size of the given dimensions, which must be equal. If none is given, they are the first dimension that most
  tensors have, on a tie the first in order; tensors that are said to go whole do not count, nor do those of block masks.
- Outputs are joined along the dimension given to `output`, else along the one that all cut tensors share, else along 0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from graphpp.batch.block_masks import of_other_rows
from graphpp.batch.microbatch import FlatMicrobatch, unwrapped
from graphpp.errors import BatchError

_OF_CALL = ("target", "output")  # roots of paths that are no arguments of the model
_ARGUMENT = re.compile(r"args\[(\d+)\]|kwargs\['([^']+)'\]")


class BatchDims:
    """Dimensions `given` by argument or path (`args[1].lengths`, `output['logits']`). `names`: the forward's parameters."""

    def __init__(self, given: Mapping[str, int | None] = MappingProxyType({}), names: Sequence[str] = ()) -> None:
        self._names = names
        self._given = {self._named(key): dim for key, dim in given.items()}

    @classmethod
    def of(cls, model: nn.Module, given: Mapping[str, int | None] | None) -> BatchDims:
        """Raises `BatchError` for a name that is no argument of the model."""
        given, parameters = given or {}, inspect.signature(model.forward).parameters.values()
        known = {*_OF_CALL, "args", "kwargs", *(each.name for each in parameters)}
        wrong = [key for key in given if _root(key) not in known]
        if wrong and not any(each.kind is each.VAR_KEYWORD for each in parameters):
            raise BatchError(
                f"microbatches.batch_dims: {wrong[0]!r} is no argument of {type(model).__name__}.forward. Take "
                f"{', '.join(each.name for each in parameters)}, target, output, or a path such as args[0]"
            )
        return cls(given, [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)])

    def says(self, path: str) -> str | None:
        """The given name that covers a tensor, None if there is none."""
        name = self._named(path) if self._given else path
        keys = [key for key in self._given if _covers(key, name)]
        return max(keys, key=len, default=None)

    def of_tensors(self, flat: FlatMicrobatch) -> tuple[int | None, dict[str, int | None]]:
        """The rows of a batch or microbatch, None without any, and each tensor's batch dimension, None for a whole one.

        Raises `BatchError` for a given dimension that a tensor lacks, and if the rows of two given dimensions differ, or those
        of a block mask.
        """
        tensors = {path: leaf for path, leaf in flat.tensors.items() if leaf.dim() and flat.masks.get(path, True)}
        names = [self._named(path) for path in flat.paths]
        roots = {_root(name) for name in names} - {"args", "kwargs"}
        for key in self._given:
            if key != _root(key) and _root(key) in roots and not any(_covers(key, name) for name in names):
                raise BatchError(f"microbatches.batch_dims: {key!r} is no part of the call, which has {', '.join(names)}")
        given = {path: self._dim(path, leaf.shape) for path, leaf in tensors.items() if self.says(path)}
        sizes = {path: tensors[path].shape[dim] for path, dim in given.items() if dim is not None}
        free = [len(leaf) for path, leaf in tensors.items() if path not in given and path not in flat.masks]
        rows = next(iter(sizes.values()), max(free, key=free.count, default=None))
        for path, size in sizes.items():
            if size != rows:
                first = next(iter(sizes))
                raise BatchError(
                    f"microbatches.batch_dims: {path} has {size} rows in dimension {given[path]}, and {first} has {rows} in "
                    f"dimension {given[first]}: give the dimension of the rows of both, or None for a tensor without rows"
                )
        for path, leaf in tensors.items():
            if path in flat.masks and given.get(path, 0) is None:
                raise BatchError(of_other_rows(path, len(leaf), "goes whole to microbatches of fewer rows"))
            if path in flat.masks and path not in given and len(leaf) != rows:
                raise BatchError(of_other_rows(path, len(leaf), f"the call has {rows or 'no'} rows"))
        return rows, {path: given.get(path, 0 if len(leaf) == rows else None) for path, leaf in tensors.items()}

    def with_rows(self, flat: FlatMicrobatch) -> FlatMicrobatch:
        """A microbatch that was not cut out of a batch, with its rows and no argument wrapped."""
        rows, dims = self.of_tensors(flat)
        return replace(unwrapped(flat), rows=rows, dim=shared(dims))

    def of_output(self, path: str, shape: Sequence[int], rows: int | None, usual: int) -> int | None:
        """The dimension of an output's rows, None without any. Raises `BatchError` if a given dimension has other rows."""
        said = self.says(path)
        dim = self._dim(path, shape) if said and shape else usual
        if dim is not None and dim < len(shape) and shape[dim] == rows:
            return dim
        if said and dim is not None and shape:
            raise BatchError(
                f"microbatches.batch_dims: {path} has the shape {list(shape)} for a microbatch of {rows} rows, and dimension "
                f"{dim} are not the rows. Give another dimension, or None for an output without rows"
            )
        return None

    def _named(self, path: str) -> str:
        """A path with the name of the model's argument: `mask.left` for `args[1]['left']` and for `kwargs['mask'].left`."""
        match = _ARGUMENT.match(path)
        name = None if match is None else match[2] or dict(enumerate(self._names)).get(int(match[1]))
        if match is not None and name is not None and name not in _OF_CALL:
            path = name + path[match.end() :]
        return re.sub(r"\['([^']+)'\]", r".\1", path)

    def _dim(self, path: str, shape: Sequence[int]) -> int | None:
        """The given dimension, counted from the front."""
        dim = self._given[self.says(path) or ""]
        if dim is not None and not -len(shape) <= dim < len(shape):
            raise BatchError(f"microbatches.batch_dims: {path} has the shape {list(shape)}, and no dimension {dim}")
        return None if dim is None else dim % len(shape)


def _root(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _covers(key: str, name: str) -> bool:
    return name.startswith(key) and name[len(key) :][:1] in ("", ".", "[")


def shared(dims: Mapping[str, int | None]) -> int:
    """The dimension along which all tensors are cut, 0 if there are several."""
    found = {dim for dim in dims.values() if dim is not None}
    return found.pop() if len(found) == 1 else 0
