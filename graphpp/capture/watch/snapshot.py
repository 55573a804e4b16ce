"""A snapshot of all objects that a walk has read, to check later that nothing changed.

Contract: `Snapshot.note` notes keys and values of dicts, items of lists and sets, attributes, global variables, closure
variables, elements of small arrays, layouts of parameters. `is_unchanged` compares by identity and calls no `__eq__` of user
objects. A snapshot keeps its objects alive, so that no address is reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import is_, methodcaller
from types import CellType
from typing import Any

import torch

from graphpp._torch.tensor_subclass import without_subclasses
from graphpp.capture.objects.names import in_cell, is_of_library
from graphpp.capture.objects.walk import REGISTRIES, Item, attributes

_ABSENT: Any = object()
_Noted = tuple[Mapping[Any, Any], tuple[Any, ...], tuple[Any, ...]]  # (mapping, keys, values)


@dataclass
class Snapshot:
    """The noted places, with their objects."""

    mappings: list[_Noted] = field(default_factory=list)
    namespaces: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = field(default_factory=list)
    lists: list[tuple[Sequence[Any], tuple[Any, ...]]] = field(default_factory=list)
    sets: list[tuple[Set[Any], dict[int, Any]]] = field(default_factory=list)  # items by identity
    entries: list[tuple[Mapping[Any, Any], Any, Any]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    variables: list[tuple[ContextVar[Any], Any]] = field(default_factory=list)
    arrays: list[tuple[Any, bytes]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, tuple[Any, ...]]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)  # of the objects

    def is_unchanged(self) -> bool:
        with without_subclasses():
            return self._is_unchanged()

    def _is_unchanged(self) -> bool:
        return (
            self._flat_mappings.are_unchanged()
            and _are(map(type, self.objects), self.classes)
            and all(len(each) == len(keys) and _are(each, keys) for each, keys in self.namespaces)
            and all(len(each) == len(values) and _are(each, values) for each, values in self.lists)
            and all([layout(each) == noted for each, noted in self.tensors])
            and all(mapping.get(key, _ABSENT) is value for mapping, key, value in self.entries)
            and all(getattr(each, name, None) is value for each, name, value in self.attributes)
            and all(in_cell(cell) is value for cell, value in self.cells)
            and all(variable.get(None) is value for variable, value in self.variables)
            and all(len(each) == len(items) and all(map(items.__contains__, map(id, each))) for each, items in self.sets)
            and all(each.tobytes() == data for each, data in self.arrays)
        )

    @cached_property
    def _flat_mappings(self) -> _FlatMappings:
        """All noted mappings; read only after the last `note`."""
        return _FlatMappings(self.mappings)

    def note(self, item: Item) -> None:
        """Note an object of a walk, and its place."""
        if item.place is not None:
            holder, name = item.place
            (self.entries if isinstance(holder, Mapping) else self.attributes).append((holder, name, item.value))
        if item.first is None and item.kind in _NOTES:
            _NOTES[item.kind](self, item.value)

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        self.mappings.append((mapping, tuple(mapping), tuple(mapping.values())))

    def _sequence(self, value: Any) -> None:
        if isinstance(value, list | deque):
            self.lists.append((value, tuple(value)))

    def _set(self, value: Any) -> None:
        if isinstance(value, MutableSet):
            self.sets.append((value, {id(each): each for each in value}))

    def _function(self, function: Any) -> None:
        self.cells += [(cell, in_cell(cell)) for cell in function.__closure__ or ()]
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self.attributes.append((function, name, getattr(function, name)))

    def _wrapper(self, value: Any) -> None:
        if isinstance(value, partial):
            self.mapping(value.keywords)

    def _object(self, value: Any) -> None:
        held = attributes(value)
        if held is not None:
            self.namespaces.append((held, tuple(held)))
        self._class(value)

    def _module(self, module: Any) -> None:
        self.mapping(vars(module))
        self._class(module)
        for name in REGISTRIES:
            self.mapping(getattr(module, name))

    def _members(self, kind: type) -> None:
        """Note the names in a class and its bases, as a new name may hide a base's member."""
        spaces = [vars(base) for base in kind.__mro__ if not is_of_library(base)]
        self.namespaces += [(space, tuple(space)) for space in spaces]

    def _class(self, value: Any) -> None:
        self.objects.append(value)
        self.classes.append(type(value))

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.tensors.append((tensor, layout(tensor)))


_NOTES: Mapping[str, Callable[[Snapshot, Any], None]] = {
    "mapping": Snapshot.mapping,
    "sequence": Snapshot._sequence,
    "set": Snapshot._set,
    "function": Snapshot._function,
    "wrapper": Snapshot._wrapper,
    "variable": lambda snapshot, value: snapshot.variables.append((value, value.get(None))),
    "array": lambda snapshot, value: snapshot.arrays.append((value, value.tobytes())),
    "object": Snapshot._object,
    "class": Snapshot._members,
    "module": Snapshot._module,
    "parameter": Snapshot._tensor,
    "buffer": Snapshot._tensor,
    "constant": Snapshot._tensor,
}


class _FlatMappings:
    """Compares many mappings at once: a module has a dozen, and most are empty."""

    def __init__(self, noted: Sequence[_Noted]) -> None:
        self._empty = [mapping for mapping, keys, _ in noted if not keys]
        full = [each for each in noted if each[1]]
        self._full = [mapping for mapping, _, _ in full]
        self._sizes = [len(keys) for _, keys, _ in full]
        self._keys = [key for _, keys, _ in full for key in keys]
        self._values = [value for _, _, values in full for value in values]

    def are_unchanged(self) -> bool:
        """Whether every mapping still has its noted keys and values, in order."""
        return (
            not any(map(len, self._empty))
            and [*map(len, self._full)] == self._sizes
            and _are(chain.from_iterable(self._full), self._keys)
            and _are(chain.from_iterable(map(_values, self._full)), self._values)
        )


_values = methodcaller("values")


def _are(found: Iterable[Any], noted: Iterable[Any]) -> bool:
    return all(map(is_, found, noted))


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a parameter on which a graph depends: requires_grad, hooks, dtype, shape, strides or layout."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.requires_grad, bool(tensor._backward_hooks), tensor.dtype, tensor.shape, strides
