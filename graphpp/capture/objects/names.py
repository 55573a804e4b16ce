"""The names for which the code of a forward or a loss asks, and the answer to "is this a library".

Contract: `reads_of` follows the code of functions to the functions and methods that the code names, and to methods such as
`__call__` that Python calls by itself, outside of torch and the standard library. A name stands for every attribute and method
of this name, and so does a text in the code, which may be the argument of a `getattr`. So `names` may have too many, and lacks
only names that code puts together at run time.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_MOST = 5_000  # functions that are followed
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib"))
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
    implicit = [each for name, found in methods.items() for each in found if is_implicit(name, each)]
    names: set[str] = set()
    variables: dict[tuple[str, str], tuple[Mapping[str, Any], str]] = {}
    pending, seen = [*functions, *implicit], set[int]()
    while pending and len(seen) < _MOST:
        function = unwrapped(pending.pop())
        if not isinstance(function, FunctionType) or id(function) in seen or comes_with_torch(function):
            continue
        seen.add(id(function))
        pending += map(in_cell, function.__closure__ or ())
        asked = set(names_in(function.__code__))
        names |= asked
        for name in sorted(asked):
            pending += methods.get(name, ())
        for space, name in _variables(function.__globals__, asked):
            pending.append(space[name])
            if not _is_installed(space.get("__file__")):
                variables[str(space.get("__name__")), name] = space, name
    return Reads(frozenset(names), tuple(variables.values()))


def in_cell(cell: CellType) -> Any:
    """The present value of a closure's variable; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def comes_with_torch(thing: Any) -> bool:
    """Whether a function or class is torch's, graphpp's or of the standard library: the names in its code are not read."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    if root == "torch" or (root in sys.stdlib_module_names and root != "__main__"):
        return _stands_in_library(thing)
    return root == "graphpp"


def is_of_library(thing: Any) -> bool:
    """Whether a function or class comes with torch, or from an installed package: its code and state do not change."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    return comes_with_torch(thing) or (_is_installed(getattr(module, "__file__", None)) and _stands_in_library(thing))


def _stands_in_library(thing: Any) -> bool:
    """False for a function of the user that has the name of a library's function, as `functools.wraps` gives it."""
    file = thing.__code__.co_filename if isinstance(thing, FunctionType) else "<"
    return file.startswith("<") or _is_installed(file)


@cache
def _is_installed(file: str | None) -> bool:
    """Whether a file of Python code lies where Python or pip puts libraries."""
    return file is not None and os.path.realpath(file).startswith(_INSTALLED)


def is_implicit(name: str, method: Any) -> bool:
    """Whether Python calls a method without a name in the code; not so a method that `dataclasses` or the like made."""
    code = getattr(unwrapped(method), "__code__", None)
    made = code is not None and code.co_filename.startswith("<")
    return code is not None and not made and name.startswith("__") and name not in _NOT_IN_A_FORWARD


def unwrapped(function: Any) -> Any:
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
        for name, value in vars(base).items() if not comes_with_torch(base) else ():
            if isinstance(unwrapped(value), FunctionType):
                found.setdefault(name, []).append(value)
    return found


@lru_cache(_MOST)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The names and texts in code and in the functions inside, which may be the names of attributes and globals."""
    found: list[str] = list(code.co_names)
    pending = list(code.co_consts)
    while pending:
        constant = pending.pop()
        if isinstance(constant, CodeType):
            found += names_in(constant)
        elif isinstance(constant, str):
            found.append(constant)
        elif isinstance(constant, tuple | frozenset):
            pending += constant
    return tuple(found)


def _variables(namespace: Mapping[str, Any], asked: set[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The variables of a module that code names, and those of modules that the code names, as in `settings.SCALE`.

    A name that is no variable may be that of a module which the code imports when it runs.
    """
    for name in sorted(asked):
        value = namespace[name] if name in namespace else sys.modules.get(name)
        if not isinstance(value, ModuleType):
            if name in namespace:
                yield namespace, name
        elif value.__name__.partition(".")[0] not in sys.stdlib_module_names | {"torch"}:
            space = vars(value)
            for inner in sorted(asked & space.keys()):
                if not isinstance(space[inner], ModuleType):
                    yield space, inner
