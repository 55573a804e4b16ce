"""The state of objects as values that can be compared.

Contract: `Walk` turns objects into nested tuples; equal tuples mean that a trace reads the same. Lists, dicts, sets, small
NumPy arrays, objects of the program, closures and bound objects are followed up to `_DEPTH` levels and `_MOST` items; further
objects are compared by identity. Every place that is read is noted in a `State`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence, Set
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphpp.capture.watch.reads import Reads, in_cell, is_of_library
from graphpp.capture.watch.snapshot import Place, Same, State

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype))
_NUMBERS = (Enum, Number, str, bytes, PurePath)  # plain data of other classes, such as `IntEnum`; NumPy's have bytes
_LARGE = 1_000  # a container with more items (a vocabulary) is compared by identity and length only
_MOST = 50_000
_DEPTH = 4
_SMALL = 65_536  # bytes of a NumPy array whose elements are compared
_OBJECTS: Any = object.__getattribute__


def plain_value(value: Any) -> Any:
    """The type and value of a flag, number or name; a tensor's identity; None for all other values."""
    kind = type(value)
    if kind is torch.Tensor:
        return Same(value)
    if kind is float:
        return kind, repr(value)  # a NaN equals itself, and 0.0 is not -0.0
    return (kind, value) if kind in _PLAIN or isinstance(value, _NUMBERS) else None


class Walk:
    """Turns objects into values, and notes in `state` what was read. `reads`: the names for which the code asks."""

    def __init__(self, state: State, reads: Reads, frozen: Mapping[Place, Any]) -> None:
        """`frozen`: the values of places that count as unchanged; None for a place that was not there."""
        self._state, self._reads, self._frozen = state, reads, frozen
        self.kinds: set[type] = set()  # the classes of objects of the program
        self._known: dict[int, Any] = {}
        self._items = 0
        self._kinds: Sequence[tuple[Any, Callable[[Any, int], Any]]] = (
            ((list, tuple, dict, Set, deque), self._container),
            (FunctionType, self._function),
            (MethodType, self._method),
            (partial, self._partial),
            (BuiltinFunctionType, lambda function, _: Same(function)),
            (torch.device, lambda device, _: str(device)),
            (type, self._class),
        )

    def attribute(self, name: str, value: Any, *, of_torch: bool) -> Any:
        """A module's attribute; None if it is not watched.

        Plain data are watched always, other objects if the code asks for the name, which torch's own modules may do.
        """
        if type(value) in _PLAIN or type(value) is torch.Tensor:
            return plain_value(value)
        return self.value(value) if of_torch or name in self._reads.names else None

    def of_variables(self) -> tuple[Any, ...]:
        """The global variables that the code reads."""
        return self._entries((space, space, name) for space, name in self._reads.variables)

    def of_classes(self, classes: Iterable[type]) -> tuple[Any, ...]:
        """The numbers, flags and names among the attributes of classes, and `forward`."""
        bases = dict.fromkeys(base for each in classes for base in each.__mro__ if not is_of_library(base))
        places = ((base, name, value) for base in bases for name, value in vars(base).items())
        watched = ((base, name) for base, name, value in places if name == "forward" or self._is_number(name, value))
        return self._entries((base, vars(base), name) for base, name in watched)

    def _is_number(self, name: str, value: Any) -> bool:
        return type(value) in _PLAIN and name in self._reads.names

    def _entries(self, places: Iterable[tuple[Any, Mapping[Any, Any], Any]]) -> tuple[Any, ...]:
        """The values under names in namespaces; a place is the owner of the namespace, the namespace, a name."""
        found = []
        for owner, space, name in places:
            value = space.get(name)
            seen = self._seen((Same(owner), name), value, _DEPTH, space)
            if seen is not None:
                found.append((name, seen))
        return tuple(found)

    def value(self, value: Any, depth: int = _DEPTH) -> Any:
        """An object as a value that can be compared; None for an object that no graph depends on by itself."""
        plain = None if _is_array(value) else plain_value(value)
        if plain is not None:
            return plain
        if isinstance(value, torch.Tensor | nn.Module | ModuleType | MappingProxyType):
            return None
        self._items += 1
        if depth == 0 or self._items > _MOST:
            return Same(value)
        if id(value) not in self._known:
            self._known[id(value)] = Same(value)  # for an object that holds itself
            self._known[id(value)] = self._followed(value, depth - 1)
        return self._known[id(value)]

    def _followed(self, value: Any, depth: int) -> Any:
        """An object with parts, or an object of the program."""
        for kinds, follow in self._kinds:
            if isinstance(value, kinds):
                return follow(value, depth)
        return self._array(value) if _is_array(value) else self._object(value, depth)

    def _method(self, method: MethodType, depth: int) -> Any:
        return Same(method.__func__), self.value(method.__self__, depth + 1)

    def _partial(self, function: partial[Any], depth: int) -> Any:
        self._state.mapping(function.keywords)
        bound: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
        return self._pairs(bound.items(), depth), self.value(function.func, depth)

    def _class(self, kind: type, depth: int) -> Any:
        return Same(kind) if is_of_library(kind) else (Same(kind), self.of_classes([kind]))

    def _container(self, value: Any, depth: int) -> Any:
        if len(value) > _LARGE:
            return Same(value), len(value)
        if isinstance(value, Set):
            if isinstance(value, MutableSet):
                self._state.sets.append((value, {id(item): item for item in value}))
            return frozenset(filter(None, map(plain_value, value)))
        if isinstance(value, dict):
            self._state.mapping(value)
            return self._pairs(value.items(), depth)
        if isinstance(value, list | deque):
            self._state.lists.append((value, tuple(value)))
        return self._pairs(enumerate(value), depth)

    def _pairs(self, items: Iterable[tuple[Any, Any]], depth: int) -> tuple[Any, ...]:
        """Keys and values; a value that no graph depends on is left out, so a list of modules is no condition."""
        pairs = ((plain_value(key), self.value(value, depth)) for key, value in items)
        return tuple(pair for pair in pairs if pair[1] is not None)

    def _function(self, function: FunctionType, depth: int) -> Any:
        if is_of_library(function):
            return Same(function)
        cells = function.__closure__ or ()
        self._state.cells += [(cell, in_cell(cell)) for cell in cells]
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._state.attributes.append((function, name, getattr(function, name)))
        self._state.mapping(vars(function))
        defaults: dict[Any, Any] = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
        held = (enumerate(map(in_cell, cells)), defaults.items(), vars(function).items())
        return Same(function.__code__), tuple(self._pairs(each, depth) for each in held)

    def _array(self, array: Any) -> Any:
        if array.nbytes > _SMALL or array.dtype.hasobject:
            return Same(array)
        data = array.tobytes()
        self._state.arrays.append((array, data))
        return str(array.dtype), array.shape, data

    def _object(self, value: Any, depth: int) -> Any:
        """An object of the program: its class, and the attributes for which the code asks."""
        kind = type(value)
        if is_of_library(kind) and kind not in (SimpleNamespace, Namespace):
            return Same(value)
        self.kinds.add(kind)
        computes = kind.__getattribute__ is not _OBJECTS or hasattr(kind, "__getattr__")  # by names that are not there, too
        try:
            held: dict[str, Any] = vars(value)
        except TypeError:  # an object with slots
            held = {}
        except Exception:  # code of the class; an object that cannot be looked at
            return Same(value)
        self._state.namespaces.append((held, tuple(held)))
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        asked = [name for name in held if computes or name in self._reads.names]
        found = []
        for name in (*asked, *slots):
            present = held[name] if name in held else getattr(value, name, None)
            seen = self._seen((Same(value), name), present, depth, held if name in held else value)
            if seen is not None:
                found.append((name, seen))
        return Same(kind), tuple(found)

    def _seen(self, place: Place, value: Any, depth: int, holder: Any) -> Any:
        """The value of a place outside of the modules, noted, or its frozen value. `holder`: the namespace, or the object."""
        if place in self._frozen:
            return self._frozen[place]
        seen = self.value(value, depth)
        if seen is not None:
            self._state.seen[place] = seen
            if isinstance(holder, Mapping):
                self._state.entries.append((holder, place[1], value))
            else:
                self._state.attributes.append((holder, place[1], value))
        return seen


def _slots(base: type) -> list[str]:
    declared = vars(base).get("__slots__", ())
    names = [declared] if isinstance(declared, str) else list(declared)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)
