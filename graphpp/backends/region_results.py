"""What a compiled region may return.

Contract
    Its results lie in memory as the graph says: other regions, which may be another rank's, and views are made for that.
    (Inductor makes a window into a larger tensor, the gradient of one part of a `cat`, without its gaps.)
    They are new at each call: those of an earlier microbatch, or of an equal layer, still wait for their backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphpp.errors import GraphPPError
from graphpp.passes.graph.region import Region
from graphpp.passes.text.render import Run
from graphpp.runtime.program import TensorMeta
from graphpp.runtime.strided_copies import copy_with_strides, meta_of


class WithCapturedStrides:
    """A compiled region, of whose results those that lie otherwise than in the graph are laid as there.

    Which ones, the first run tells: shapes are fixed, so a compiled region does the same each time. It raises
    `GraphPPError` for results that are not those of the region.
    """

    def __init__(self, region: Region, run: Run) -> None:
        self._run, self._title = run, region.title
        self._wanted = [meta_of(value) if isinstance(value, torch.Tensor) else None for value in region.results]
        self._otherwise: list[tuple[int, TensorMeta]] | None = None

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        results = self._run(boxed)
        if self._otherwise is None:
            self._otherwise = self._look_at(results)
        if not self._otherwise:
            return results
        laid = list(results)
        for at, meta in self._otherwise:
            laid[at] = copy_with_strides(meta, laid[at])
        return laid

    def _look_at(self, results: Sequence[Any]) -> list[tuple[int, TensorMeta]]:
        if len(results) != len(self._wanted):
            raise GraphPPError(f"backend=: {self._title} has {len(self._wanted)} results, compiled it returned {len(results)}")
        found = []
        for at, (value, meta) in enumerate(zip(results, self._wanted, strict=True)):
            if meta is None:
                continue
            if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (meta.shape, meta.dtype):
                raise GraphPPError(f"backend=: result {at} of {self._title} is {_said(meta)}, compiled it is {_said(value)}")
            if _lies_otherwise(value, meta):
                found.append((at, meta))
        return found


def _said(value: Any) -> str:
    if not isinstance(value, torch.Tensor | TensorMeta):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _lies_otherwise(value: torch.Tensor, wanted: TensorMeta) -> bool:
    """Whether a stride is another one; where there is one element or none it does not matter."""
    strides = zip(value.shape, value.stride(), wanted.stride, strict=True)
    return value.numel() > 1 and any(size > 1 and found != stride for size, found, stride in strides)


class FreshResultsCheck:
    """Looks whether a region's results lie in the memory of those of an earlier call that somebody still holds.

    Results that depend on no input may be one constant, and those that are views of an input lie where it lies.
    """

    def __init__(self, region: Region) -> None:
        self._title, self._computed = region.title, _computed(region.graph)
        self._held: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def check(self, results: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Raise `GraphPPError` where a result is in memory that an earlier one still has."""
        pairs = zip(results, self._computed, strict=False)  # how many there are is checked elsewhere
        found = {id(storage): storage for storage in _storages(value for value, computed in pairs if computed)}
        again = found.keys() & self._held.keys()
        if again and not again <= {id(storage) for storage in _storages(arguments)}:
            raise GraphPPError(
                f"backend=: {self._title} was compiled to a function that returns results in the memory of an earlier call's, "
                "which may still be needed for a backward, or by an equal layer: let it return new tensors (clone them)"
            )
        self._held.update(found)


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Torch gives a memory the same object as long as it lives."""
    return [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]


def _computed(graph: fx.Graph) -> list[bool]:
    """Of each result, whether it depends on an input."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    results: Any = graph.output_node().args[0]
    return [node in reached for node in results]
