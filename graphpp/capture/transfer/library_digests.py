"""Digests of the functions, classes and values of installed libraries, equal in two processes that have equal ones.

Contract: values count down to a depth of three containers or objects; a change below that depth is not seen. A function, class
or object of the user that stands in a library raises `UnreadableError`: its state may lie deeper. The digest of a value does
not depend on the values that were read before: two processes read in different orders.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from graphpp._torch import aot
from graphpp.capture.transfer.libraries import is_installed, top_package
from graphpp.capture.transfer.library_state import LibraryState
from graphpp.capture.transfer.names_asked import UnreadableError
from graphpp.capture.transfer.objects import (
    COMPILED,
    SCALARS,
    WITHOUT_EFFECT,
    attributes_of,
    state_of_logger,
)
from graphpp.capture.transfer.reachable_code import facts_of_code, plain_members
from graphpp.capture.watch.reads import in_cell

_DEPTH = 3
_MOST_ITEMS = 10000  # of a container


@dataclass(frozen=True)
class _Description:
    """The text of a value, in which classes stand with their names alone, and these classes."""

    text: str
    classes: frozenset[type]


class Digests:
    """Digests of values; each class and each code is read once. `before` has former attributes of classes and modules.

    Classes name each other in circles. So a value is described without what is in the classes that it names, and its digest
    counts the descriptions of all classes that can be reached from it.
    """

    def __init__(self, before: LibraryState | None = None) -> None:
        self._before = before or LibraryState()
        self._of_class: dict[type, _Description] = {}
        self._of_object: dict[tuple[int, int], _Description] = {}  # by identity and depth
        self._of_classes: dict[frozenset[type], str] = {}
        self._alive: list[Any] = []  # objects whose identities must not be used twice
        self._of_code: dict[types.CodeType, str] = {}
        self._named: set[type] = set()  # the classes in the text that is being made

    def of(self, value: Any) -> str:
        """The digest of a global or a class."""
        found = self._described(lambda: self._text(value, _DEPTH))
        if found.classes not in self._of_classes:
            self._of_classes[found.classes] = " ".join(sorted(self._reached(found.classes)))
        return _digest(f"{found.text} {self._of_classes[found.classes]}")

    def _reached(self, classes: frozenset[type]) -> Iterator[str]:
        """The texts of classes and of all classes that they name."""
        seen, pending = set(classes), list(classes)
        while pending:
            kind = pending.pop()
            if kind not in self._of_class:
                self._of_class[kind] = self._described(functools.partial(self._inside, kind))
            yield self._of_class[kind].text
            pending += self._of_class[kind].classes - seen
            seen |= self._of_class[kind].classes

    def _described(self, text: Callable[[], str]) -> _Description:
        """A text with the classes that it names."""
        around, self._named = self._named, set()
        try:
            return _Description(text(), frozenset(self._named))
        finally:
            self._named = around

    def of_code(self, code: types.CodeType) -> str:
        """The digest of a function's code."""
        if code not in self._of_code:
            self._of_code[code] = _digest(repr(list(facts_of_code(code))))
        return self._of_code[code]

    def _text(self, value: Any, depth: int) -> str:
        if type(value) in SCALARS:
            return repr(value)
        key = id(value), depth
        if key not in self._of_object:
            self._alive.append(value)
            text = next((text for kinds, text in self._texts if isinstance(value, kinds)), Digests._object)
            self._of_object[key] = self._described(lambda: _shortened(text(self, value, depth)))
        self._named |= self._of_object[key].classes
        return self._of_object[key].text

    def _object(self, value: Any, depth: int) -> str:
        _check_installed(type(value))
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return f"{type(value).__qualname__} {_digest(repr(value.tobytes()))}"
        attributes = sorted((attributes_of(value) or {}).items())
        return f"{type(value).__module__}.{type(value).__qualname__}({self._items(attributes, depth)})"

    def _items(self, items: Sequence[tuple[Any, Any]], depth: int) -> str:
        if depth <= 0 or len(items) > _MOST_ITEMS:
            return str(len(items))
        return ", ".join(f"{self._text(key, 0)}: {self._text(each, depth - 1)}" for key, each in items)

    def _class(self, kind: type, _: int) -> str:
        _check_installed(kind)
        self._named.add(kind)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _inside(self, kind: type) -> str:
        """The functions and plain values of a class and its bases."""
        bases = [base for base in kind.__mro__ if base is not object]
        registered = {base: self._before.registered_with(base) for base in bases}
        members = {base: sorted(plain_members(self._before.of_class(base)).items()) for base in bases}
        texts = {base: self._items(found, 2) for base, found in members.items()}
        own = (f"{base.__qualname__}({text}){registered[base] or ''}" for base, text in texts.items())
        return f"{kind.__module__}.{kind.__qualname__} {_digest(' '.join(own))}"

    def _function(self, function: types.FunctionType, depth: int) -> str:
        """The code of a function, its defaults, and the functions that it wraps."""
        _check_installed(function)
        inner = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        inner += map(in_cell, function.__closure__ or ())
        around = [self._text(each, depth - 1) for each in inner] if depth > 0 else []
        return f"{function.__module__}.{function.__qualname__} {self.of_code(function.__code__)} {around}"

    def _wrapper(self, value: Any, depth: int) -> str:
        parts = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__")
        held = (self._text(getattr(value, part), depth) for part in parts if hasattr(value, part))
        return f"{type(value).__qualname__}({', '.join(held)})"

    def _sequence(self, value: Any, depth: int) -> str:
        shown = depth > 0 and len(value) <= _MOST_ITEMS
        texts = [self._text(each, depth - 1) for each in value] if shown else [str(len(value))]
        ordered = sorted(texts) if isinstance(value, set | frozenset) else texts
        return f"{type(value).__qualname__}[{', '.join(ordered)}]"

    def _mapping(self, value: Any, depth: int) -> str:
        return f"{type(value).__qualname__}{{{self._items(list(dict(value).items()), depth)}}}"

    def _enum(self, value: Enum, depth: int) -> str:
        return f"{type(value).__qualname__}.{value.name}({self._items(sorted(vars(value).items()), depth)})"

    def _tensor(self, value: torch.Tensor, _: int) -> str:
        shown = f"{value.dtype} {tuple(value.shape)}"
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
        return f"{shown} {value.tolist()}" if plain and value.numel() <= _MOST_ITEMS else shown

    def _name(self, value: Any, _: int) -> str:
        return f"{type(value).__qualname__} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"

    _texts: tuple[tuple[Any, Callable[[Digests, Any, int], str]], ...] = (
        (logging.Logger, lambda self, value, depth: str(state_of_logger(value))),
        ((*WITHOUT_EFFECT, type(os.environ)), lambda self, value, depth: type(value).__qualname__),
        (ContextVar, lambda self, value, depth: f"{value.name} {self._text(value.get(None), depth - 1)}"),
        (types.ModuleType, lambda self, value, depth: f"module {value.__name__}"),
        (type, _class),
        (types.FunctionType, _function),
        ((types.MethodType, functools.partial, staticmethod, classmethod, property, functools._lru_cache_wrapper), _wrapper),
        (COMPILED, _name),
        ((aot.Operator, aot.OperatorPacket), lambda self, value, depth: str(value)),
        (Enum, _enum),
        (torch.Tensor, _tensor),
        (torch.device, lambda self, value, depth: value.type),
        (dict, _mapping),
        (types.MappingProxyType, _mapping),
        ((list, tuple, deque, set, frozenset), _sequence),
    )


def _check_installed(value: Any) -> None:
    """Raise `UnreadableError` for a function or class of the user that stands in a library."""
    if not is_installed(top_package(value)):
        raise UnreadableError(f"{value.__module__}.{value.__qualname__}, which stands in a library")


def _shortened(text: str) -> str:
    return text if len(text) < 200 else _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
