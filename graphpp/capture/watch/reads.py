"""The names for which the code of a forward or a loss asks.

Contract: `reads_of` follows the code of functions to the functions and methods that the code names, and to methods such as
`__call__` that Python calls by itself, outside of torch and the standard library. A name stands for every attribute and method
of this name, and so does a text in the code, which may be the argument of a `getattr`. So `names` may have too many, and lacks
only names that code puts together at run time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_MOST = 5_000  # functions that are followed
_NOT_IN_A_FORWARD = frozenset(  # methods that Python calls without a name in the code, but not while a forward runs
    ("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__",
     "__setstate__", "__init_subclass__", "__class_getitem__", "__deepcopy__", "__copy__", "__dir__")
)  # fmt: skip


@dataclass(frozen=True)
class Reads:
    """The names that code asks for, and the global variables that it reads, each as the namespace and the name."""

    names: frozenset[str] = frozenset()
    variables: tuple[tuple[Mapping[str, Any], str], ...] = ()


def reads_of(functions: Iterable[Any], classes: Iterable[type]) -> Reads:
    """The names and variables that the code of functions, and all code that they call, reads.

    `classes`: the classes of the objects in reach, whose methods the code may name.
    """
    methods = _methods(classes)
    unnamed = (name for name in methods if name.startswith("__") and name not in _NOT_IN_A_FORWARD)
    implicit = [each for name in unnamed for each in methods[name] if not _is_generated(each)]
    names: set[str] = set()
    variables: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    pending, seen = [*functions, *implicit], set[int]()
    while pending and len(seen) < _MOST:
        function = _plain(pending.pop())
        if not isinstance(function, FunctionType) or id(function) in seen or is_of_library(function):
            continue
        seen.add(id(function))
        pending += map(in_cell, function.__closure__ or ())
        asked = set(_names(function.__code__))
        names |= asked
        for name in asked:
            pending += methods.get(name, ())
        for space, name in _variables(function.__globals__, asked):
            variables[id(space), name] = space, name
            pending.append(space[name])
    return Reads(frozenset(names), tuple(variables.values()))


def in_cell(cell: CellType) -> Any:
    """The present value of a closure's variable; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_of_library(thing: Any) -> bool:
    """Whether a function or class is torch's or of the standard library: its code and state do not change."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return root in ("torch", "graphpp") or (root in sys.stdlib_module_names and root != "__main__")


def _is_generated(function: Any) -> bool:
    """Whether a method was made by `dataclasses` or the like: an `__eq__` that compares all fields, which no forward calls."""
    code = getattr(_plain(function), "__code__", None)
    return code is not None and bool(code.co_filename.startswith("<"))


def _plain(function: Any) -> Any:
    """The function of a method, property, partial and the like."""
    while True:
        if isinstance(function, MethodType | staticmethod | classmethod):
            function = function.__func__
        elif isinstance(function, partial):
            function = function.func
        elif isinstance(function, property):
            function = function.fget
        else:
            return function


def _methods(classes: Iterable[type]) -> dict[str, list[Any]]:
    """The functions that classes define, by name."""
    found: dict[str, list[Any]] = {}
    for base in dict.fromkeys(base for each in classes for base in each.__mro__):
        for name, value in vars(base).items() if not is_of_library(base) else ():
            if isinstance(_plain(value), FunctionType):
                found.setdefault(name, []).append(value)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    pending = list(code.co_consts)
    while pending:
        constant = pending.pop()
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            pending += constant


def _variables(namespace: Mapping[str, Any], asked: set[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The variables of a module that code names, and those of modules that the code names, as in `settings.SCALE`."""
    for name in asked & namespace.keys():
        value = namespace[name]
        if not isinstance(value, ModuleType):
            yield namespace, name
        elif value.__name__.partition(".")[0] not in sys.stdlib_module_names | {"torch"}:
            space = vars(value)
            yield from ((space, inner) for inner in asked & space.keys() if not isinstance(space[inner], ModuleType))
