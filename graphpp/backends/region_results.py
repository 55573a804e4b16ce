"""Checks inputs and results of a compiled region: strides as captured, results in new memory.

Contract
--------
- `CompiledRegion` gives each result its strides in the graph, for which other regions and views were captured. (Inductor, for
  one, may return a window into a larger tensor, such as the gradient of one part of a `cat`, without the window's gaps.)
- `WithCapturedInputs` gives each input of one call its strides in the graph, as Inductor raises for others: an eager kernel may
  return other strides than its fake kernel. Which inputs differ depends on the call: equal layers share one compiled region,
  but not the kernels before it.
- `FreshResultsCheck` raises if a region returns results in the memory of an earlier call's results, which the backward of an
  earlier microbatch or of an equal layer may still need.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import Symbols, Values
from graphpp.errors import GraphPPError
from graphpp.passes.graph.region import Region
from graphpp.passes.text.render import Run
from graphpp.runtime.messages.wire_layout import copy_with_strides, meta_of
from graphpp.runtime.program import TensorMeta


class CompiledRegion:
    """A compiled region that copies results to the graph's strides where they differ.

    The first run finds these results: shapes are fixed, so strides stay the same. It raises `GraphPPError` if the number,
    shape or dtype of results differs from the region's.
    """

    def __init__(self, region: Region, run: Run, values: Values | None = None, symbols: Symbols | None = None) -> None:
        """`values`: numbers for the region's symbolic sizes; `symbols`: guards for which the code is valid."""
        self.region, self.symbols, self._run, self._title = region, symbols, run, region.title
        self._metas = _metas_of(region.results, values)
        self._mismatched: list[tuple[int, TensorMeta]] | None = None

    def at(self, values: Values) -> CompiledRegion:
        return CompiledRegion(self.region, self._run, values)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        results = self._run(arguments)
        if self._mismatched is None:
            self._mismatched = self._check(results)
        if not self._mismatched:
            return results
        restrided = list(results)
        for at, meta in self._mismatched:
            restrided[at] = copy_with_strides(meta, restrided[at])
        return restrided

    def _check(self, results: Sequence[Any]) -> list[tuple[int, TensorMeta]]:
        """The results whose strides differ from the graph's: position and metadata."""
        if len(results) != len(self._metas):
            raise GraphPPError(f"backend=: {self._title} has {len(self._metas)} results, compiled it returned {len(results)}")
        mismatched = []
        for at, (value, meta) in enumerate(zip(results, self._metas, strict=True)):
            if meta is None:
                continue
            if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (meta.shape, meta.dtype):
                expected, found = _describe(meta), _describe(value)
                raise GraphPPError(f"backend=: result {at} of {self._title} is {expected}, compiled it is {found}")
            if _strides_differ(value, meta):
                mismatched.append((at, meta))
        return mismatched


class WithCapturedInputs:
    """One call of a compiled region that copies inputs to the graph's strides where they differ, as found in the first run."""

    def __init__(self, run: CompiledRegion, values: Values | None = None) -> None:
        """`values`: numbers for the region's symbolic sizes."""
        self._run = run
        self._metas = _metas_of(run.region.examples, values)
        self._mismatched: list[tuple[int, TensorMeta]] | None = None

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        if self._mismatched is None:
            pairs = enumerate(zip(boxed, self._metas, strict=True))
            self._mismatched = [(at, meta) for at, (value, meta) in pairs if meta is not None and _strides_differ(value, meta)]
        for at, meta in self._mismatched:
            boxed[at] = copy_with_strides(meta, boxed[at])
        return self._run(boxed)


def _metas_of(values: Sequence[Any], sizes: Values | None) -> list[TensorMeta | None]:
    """The metadata of tensors at these sizes; None for other values."""
    metas = [meta_of(value) if isinstance(value, torch.Tensor) else None for value in values]
    return metas if sizes is None else [meta.at(sizes) if meta is not None else None for meta in metas]


def _describe(value: Any) -> str:
    """Dtype and shape of a tensor, or the type of another value, for messages."""
    if not isinstance(value, torch.Tensor | TensorMeta):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _strides_differ(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Whether a stride differs in a dimension of more than one element."""
    strides = zip(value.shape, value.stride(), meta.stride, strict=True)
    return value.numel() > 1 and any(size > 1 and found != stride for size, found, stride in strides)


class FreshResultsCheck:
    """Detects results in the memory of earlier, live results; only constants and views of inputs may share memory."""

    def __init__(self, region: Region) -> None:
        self._title, self._computed = region.title, _computed(region.graph)
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def check(self, results: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Raise `GraphPPError` for a result in the memory of an earlier result that is still alive."""
        pairs = zip(results, self._computed, strict=False)  # `CompiledRegion` checks the number
        found = {id(storage): storage for storage in _storages(value for value, computed in pairs if computed)}
        reused = found.keys() & self._alive.keys()
        if reused and not reused <= {id(storage) for storage in _storages(arguments)}:
            raise GraphPPError(
                f"backend=: {self._title} was compiled to a function that returns results in the memory of an earlier call's, "
                "which may still be needed for a backward, or by an equal layer: let it return new tensors (clone them)"
            )
        self._alive.update(found)


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """The tensors' storages. Torch returns the same Python object for a storage while it is alive."""
    return [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]


def _computed(graph: fx.Graph) -> list[bool]:
    """For each result, whether it depends on an input."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    results: Any = graph.output_node().args[0]
    return [node in reached for node in results]
