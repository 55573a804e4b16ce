"""A snapshot of places in the state of a program, and whether each place still has the same object.

Contract: `State` notes places: items of dicts, lists and sets, attributes, variables of closures, elements of small arrays,
layouts of parameters. `is_unchanged` compares the places by identity, and runs no `__eq__` of the program's objects. The
objects are held, so that no other object gets the same address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import is_, methodcaller
from types import CellType
from typing import Any

import torch

from graphpp._torch.tensor_subclass import without_subclasses
from graphpp.capture.watch.reads import in_cell

_ABSENT: Any = object()


class Same:
    """An object that is compared by identity, and held, so that no other object gets the same address."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


Place = tuple[Same, Any]  # the namespace of an object, class or Python module, and a name


@dataclass
class State:
    """The places that were read, with the objects found there; `seen`: the values of places outside of the modules."""

    seen: dict[Place, Any] = field(default_factory=dict)
    namespaces: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = field(default_factory=list)
    mappings: list[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
    lists: list[tuple[Sequence[Any], tuple[Any, ...]]] = field(default_factory=list)
    sets: list[tuple[Set[Any], dict[int, Any]]] = field(default_factory=list)  # items by identity
    entries: list[tuple[Mapping[Any, Any], Any, Any]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    arrays: list[tuple[Any, bytes]] = field(default_factory=list)
    parameters: list[tuple[torch.Tensor, tuple[Any, ...]]] = field(default_factory=list)

    def is_unchanged(self) -> bool:
        """Whether every place still has the same object."""
        with without_subclasses():
            return self._is_unchanged()

    def _is_unchanged(self) -> bool:
        return (
            self._flat_mappings.are_unchanged()
            and all(len(each) == len(keys) and _are(each, keys) for each, keys in self.namespaces)
            and all(len(each) == len(values) and _are(each, values) for each, values in self.lists)
            and all([_facts(each) == facts for each, facts in self.parameters])
            and all(mapping.get(key, _ABSENT) is value for mapping, key, value in self.entries)
            and all(getattr(each, name, None) is value for each, name, value in self.attributes)
            and all(in_cell(cell) is value for cell, value in self.cells)
            and all(len(each) == len(items) and all(map(items.__contains__, map(id, each))) for each, items in self.sets)
            and all(each.tobytes() == data for each, data in self.arrays)
        )

    @cached_property
    def _flat_mappings(self) -> _FlatMappings:
        """All mappings that were noted; read it only when all have been noted."""
        return _FlatMappings(self.mappings)

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        """Note all keys and values of a dict."""
        self.mappings.append((mapping, tuple(mapping), tuple(mapping.values())))

    def of_parameter(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """The facts of a parameter that a graph is made for: whether it is trained and hooked, dtype, shape and strides."""
        facts = _facts(parameter)
        self.parameters.append((parameter, facts))
        return facts

    def of_buffer(self, buffer: torch.Tensor) -> tuple[Any, ...]:
        """Dtype, shape and strides: a graph fits these, and compiled code relies on the strides."""
        return self.of_parameter(buffer)[2:]


class _FlatMappings:
    """Many mappings, compared at once: a module has a dozen, and most are empty."""

    def __init__(self, noted: Sequence[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[Any, ...]]]) -> None:
        self._empty = [mapping for mapping, keys, _ in noted if not keys]
        full = [each for each in noted if each[1]]
        self._full = [mapping for mapping, _, _ in full]
        self._sizes = [len(keys) for _, keys, _ in full]
        self._keys = [key for _, keys, _ in full for key in keys]
        self._values = [value for _, _, values in full for value in values]

    def are_unchanged(self) -> bool:
        """Whether every mapping has the keys and values that were noted, in that order."""
        return (
            not any(map(len, self._empty))
            and [*map(len, self._full)] == self._sizes
            and _are(chain.from_iterable(self._full), self._keys)
            and _are(chain.from_iterable(map(_values, self._full)), self._values)
        )


_values = methodcaller("values")


def _are(found: Iterable[Any], noted: Iterable[Any]) -> bool:
    return all(map(is_, found, noted))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.layout
    strides = tensor.stride() if layout is torch.strided else layout
    return tensor.requires_grad, bool(tensor._backward_hooks), tensor.dtype, tensor.shape, strides
