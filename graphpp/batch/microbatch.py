"""One microbatch: the arguments of one call of the model, its tensors by path, and its signature.

Contract
--------
- Each tensor of a microbatch has a path: `args[0]`, `kwargs['mask']`, `target['labels']`.
- A leaf is a tensor or plain data (a number, a string, None, ..). Any other object is refused: a tensor inside it would
  become a constant of the graph.
- Two microbatches have equal `signature`s exactly if one captured graph serves both: same structure, same shapes, strides and
  dtypes of tensors, same values of all other leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import NoneType
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp._torch.parallel.sharded_tensor import is_dtensor
from graphpp.arguments import MAPPING, require, shown, type_name
from graphpp.batch.block_masks import has_rows, lines_of_masks, refuse_whole_rows, tree_with_masks
from graphpp.errors import BatchError

_OF_PYTHON = (NoneType, bool, int, float, complex, str, bytes, range, slice, Enum)
_WIDE = torch.int64, torch.float64
_PLAIN = (*_OF_PYTHON, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class _TensorLeaf:
    """Replaces each tensor in a structure that is kept without tensors."""

    def __repr__(self) -> str:
        return "<tensor>"


TENSOR_LEAF = _TensorLeaf()


@dataclass(frozen=True)
class Microbatch:
    """The arguments of one call, `loss(model(*args, **kwargs), target, **loss_kwargs)`. Tensors may be nested at any depth."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(BatchError, "Microbatch.kwargs", MAPPING, self.kwargs)
        require(BatchError, "Microbatch.loss_kwargs", MAPPING, self.loss_kwargs)
        args = self.args if isinstance(self.args, tuple | list) else (self.args,)
        object.__setattr__(self, "args", tuple(args))
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        object.__setattr__(self, "loss_kwargs", dict(self.loss_kwargs))


@dataclass(frozen=True)
class Whole:
    """Wraps an argument that is not cut, even if its first dimension is the batch size."""

    value: Any


def whole(value: Any) -> Whole:
    """Mark a tensor, or a structure of tensors, as having no batch dimension: every microbatch gets all of it."""
    return Whole(value)


def whole_each(named: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The values with their tensors marked as `whole`."""
    require(BatchError, "loss_kwargs", MAPPING, {} if named is None else named)
    mark = lambda leaf: Whole(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return {name: pytree.tree_map(mark, value) for name, value in (named or {}).items()}


def absent(shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data, for an argument of `pipe.step` or `pipe.eval` that this rank does not have.

    `shape`, `dtype`: those of the tensor on the other ranks. `pipe.inputs_needed()` lists the arguments that a rank reads. If
    one of them is absent, the lowest rank of the pipeline that has the argument sends it in each call. Returns a
    contiguous meta tensor, so ranks with data must pass contiguous tensors (`.contiguous()`). Any other meta tensor works too.

    Raises `BatchError` for an invalid shape or dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"absent: dtype must be a torch.dtype, got {shown(dtype)}")
    try:
        return torch.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:
        raise BatchError(f"absent: shape must be a tuple of sizes, got {shown(shape)}") from error


def without_data(leaf: Any) -> Any:
    """The leaf; of a tensor one on the meta device, of the same shape, strides and dtype."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


@dataclass(frozen=True)
class FlatMicrobatch:
    """A microbatch (or a batch) as leaves with paths and a structure.

    `rows`: of a microbatch, None without any. `dim`: the batch dimension that all its tensors with rows share, else 0.
    `numbers`: the paths of Python numbers that a graph takes as inputs, as 0-dim tensors. `masks`: the paths of the
    tensors of block masks, and whether each is cut along the rows.
    """

    spec: pytree.TreeSpec
    paths: tuple[str, ...]
    values: tuple[Any, ...]
    rows: int | None = field(default=None, compare=False)
    dim: int = field(default=0, compare=False)
    numbers: frozenset[str] = frozenset()
    masks: Mapping[str, bool] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, batch: Microbatch) -> FlatMicrobatch:
        """Flatten `batch`; `whole` arguments stay wrapped. Raises `BatchError` for leaves that may contain tensors."""
        tree: dict[str, Any] = {"args": batch.args, "kwargs": batch.kwargs, "target": batch.target}
        if batch.loss_kwargs:
            tree["loss_kwargs"] = batch.loss_kwargs
        pairs, spec = pytree.tree_flatten_with_path(tree_with_masks(tree))
        masks = {_path(keys): cut for keys, _ in pairs if (cut := has_rows(keys)) is not None}
        flat = cls(spec, tuple(_path(keys) for keys, _ in pairs), tuple(_resolved(leaf) for _, leaf in pairs), masks=masks)
        for path, leaf in zip(flat.paths, flat.values, strict=True):
            _check_leaf(path, leaf)
        return flat

    def take_signature(self, signature: tuple[str, ...]) -> None:
        """Reuse the signature of another microbatch with equal shapes, strides and plain data."""
        vars(self)["signature"] = signature

    def microbatch(self) -> Microbatch:
        """The microbatch in its original structure, with no argument wrapped."""
        values = [leaf.value if isinstance(leaf, Whole) else leaf for leaf in self.values]
        return Microbatch(**pytree.tree_unflatten(values, self.spec))

    @property
    def pairs(self) -> list[tuple[str, Any]]:
        """Each leaf with its path."""
        return list(zip(self.paths, self.values, strict=True))

    def with_numbers(self, paths: frozenset[str]) -> FlatMicrobatch:
        """The microbatch with the numbers at `paths` as inputs of a graph, and all other numbers as plain data."""
        if paths == self.numbers:
            return self
        plain = [(path, leaf.item() if path in self.numbers else leaf) for path, leaf in self.pairs]
        values = [torch.tensor(leaf, dtype=_WIDE[isinstance(leaf, float)]) if path in paths else leaf for path, leaf in plain]
        return replace(self, values=tuple(values), numbers=paths)

    @property
    def plain_numbers(self) -> dict[str, float]:
        """The numbers that are plain data and that a graph could take as inputs, by path."""
        plain = {path: leaf for path, leaf in self.pairs if isinstance(leaf, int | float) and not isinstance(leaf, bool | Enum)}
        return {path: leaf for path, leaf in plain.items() if isinstance(leaf, float) or -(2**63) <= leaf < 2**63}

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by path, in order."""
        return {path: leaf for path, leaf in self.pairs if isinstance(leaf, torch.Tensor)}

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """The structure, and a line per leaf: shape, dtype and strides of a tensor, or the value of plain data."""
        return self._lines(_describe)

    def _lines(self, describe: Callable[[Any], str], known: Collection[str] = ()) -> tuple[str, ...]:
        """The structure and a line per leaf, with the type of a number that a graph takes as an input or that is in `known`."""
        numbers = {*self.numbers, *known}
        leaves = (f"{path}: {_describe_number(leaf) if path in numbers else describe(leaf)}" for path, leaf in self.pairs)
        return (*lines_of_masks(self.spec), f"the structure {self.spec}", *leaves)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in self.tensors.values()]

    @cached_property
    def kind(self) -> tuple[str, ...]:
        """The signature without the sizes of integer tensors and of contiguous tensors."""
        return self._lines(_describe_kind)

    @cached_property
    def wide_kind(self) -> tuple[str, ...]:
        """The kind without the values of numbers."""
        return self._lines(_describe_kind, self.plain_numbers)

    def without_data(self) -> FlatMicrobatch:
        """The microbatch with meta tensors of the same layouts, which take no memory."""
        return replace(self, values=tuple(map(without_data, self.values)))

    def with_ordered_integers(self) -> FlatMicrobatch:
        """The microbatch with integer and bool tensors made contiguous, which does not change the results of kernels."""
        if not any(map(is_unordered_integers, self.values)):
            return self
        return replace(self, values=tuple(leaf.contiguous() if is_unordered_integers(leaf) else leaf for leaf in self.values))


def flatten_microbatch(batch: Microbatch) -> FlatMicrobatch:
    """Flatten one microbatch. Raises `BatchError` for another type and for leaves that may hide tensors."""
    if not isinstance(batch, Microbatch):
        raise BatchError(f"a microbatch is a graphpp.Microbatch(args, kwargs, target), got {type_name(batch)}")
    return FlatMicrobatch.of(batch)


def unwrapped(flat: FlatMicrobatch) -> FlatMicrobatch:
    """The microbatch with no argument wrapped in `whole`."""
    if not any(isinstance(leaf, Whole) for leaf in flat.values):
        return flat
    return replace(FlatMicrobatch.of(flat.microbatch()), rows=flat.rows, dim=flat.dim)


def tensors_by_path(batch: Microbatch) -> dict[str, torch.Tensor]:
    return FlatMicrobatch.of(batch).tensors


def with_tensors(example: Microbatch, values: Sequence[torch.Tensor | float]) -> Microbatch:
    """Replace the tensors of a microbatch by `values`, in the order of `tensors_by_path`."""
    flat = FlatMicrobatch.of(example)
    remaining = iter(values)
    filled = tuple(next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.values)
    return FlatMicrobatch(flat.spec, flat.paths, filled).microbatch()


def is_plain_data(leaf: Any) -> bool:
    """Whether a leaf is data that hides no tensor and for which equal `repr`s mean equal values."""
    return isinstance(leaf, _PLAIN)


def _path(keys: Sequence[Any]) -> str:
    """The text of a pytree key path, such as `args[0]`."""
    text = pytree.keystr(tuple(keys))
    head, _, rest = text.removeprefix("['").partition("']")
    return head + rest


def _resolved(leaf: Any) -> Any:
    """The leaf; of a tensor that is conjugated or negated lazily the values, since a graph is traced without such a flag."""
    lazy = isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg())
    return leaf.resolve_conj().resolve_neg() if lazy else leaf


def _check_leaf(path: str, leaf: Any) -> None:
    """Raise `BatchError` for unsupported tensors and for objects that may contain tensors."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout).removeprefix("torch.")
            raise BatchError(
                f"{path} is a {kind} tensor, which cannot be cut or sent: pass a dense one, e.g. {path}.to_dense(), padded to "
                "one length"
            )
        if is_dtensor(leaf):
            raise BatchError(
                f"{path} is a DTensor, and ranks give plain tensors: pass {path}.full_tensor(), and let the model spread the "
                "values, for example by PrepareModuleInput"
            )
        if leaf.requires_grad:
            raise BatchError(
                f"{path} requires grad: a pipeline makes gradients of parameters only; pass {path}.detach()"
            )
    elif isinstance(leaf, Whole):
        refuse_whole_rows(path, leaf.value)
    elif not is_plain_data(leaf):
        numpy = type(leaf).__module__ == "numpy"
        remedy = "torch.as_tensor(...) of it" if numpy else "its tensors in a tuple, list or dict"
        more = "" if numpy else ", or register its class with torch.export.register_dataclass or torch's pytree"
        raise BatchError(
            f"{path} is a {type(leaf).__qualname__}: the tensors in it cannot be seen and would become constants of "
            f"the graph. Pass {remedy}{more}."
        )


def is_unordered_integers(leaf: Any) -> bool:
    """Whether a leaf is a non-contiguous tensor of integers or bools."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.is_contiguous())


def _describe_kind(leaf: Any) -> str:
    """A leaf's line of `kind`."""
    ordered = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.is_contiguous()
    if ordered or is_unordered_integers(leaf):
        return f"{leaf.dim()} dimensions, {leaf.dtype}"
    return _describe(leaf)


def _describe_number(leaf: Any) -> str:
    floating = leaf.is_floating_point() if isinstance(leaf, torch.Tensor) else isinstance(leaf, float)
    return f"any {'float' if floating else 'int'}"


def _describe(leaf: Any) -> str:
    """A leaf's line of `signature`; the stride of a dimension of size 1 does not count."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    strides = [step if size > 1 else 0 for size, step in zip(leaf.shape, leaf.stride(), strict=True)]
    return f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}, strides {strides}"
