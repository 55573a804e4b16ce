"""Read the code of classes and functions that a trace can reach; part of the walk in `reachable.py`.

Contract: user code counts with its bytecode, defaults, closures and the globals that the code names. Code of a library counts
by the version of the library. `UnreadableError` is raised for code that asks which process runs it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from graphpp.capture.transfer.libraries import is_below_libraries, is_installed, top_package, version
from graphpp.capture.transfer.module_uses import global_named, module_uses
from graphpp.capture.transfer.names_asked import ENVIRONMENT, PER_PROCESS, UnreadableError
from graphpp.capture.transfer.objects import registered_with
from graphpp.capture.watch.reads import in_cell

Children = Iterator[tuple[str, Any]]

_BY_TEXT = frozenset(("globals", "exec", "__import__", "import_module"))  # names in code that finds objects by texts
_GENERATED = (  # attributes that Python and torch give to classes
    "__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "_abc_impl",
    "_backward_cls", "_compiled_autograd_backward_state",
)  # fmt: skip
_OF_IMPORT = frozenset(("__builtins__", "__cached__", "__file__", "__loader__", "__path__", "__spec__"))  # in modules
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: the class was made by a program, not compiled into the interpreter
_MISSING = object()


def named(name: str, attributes: Mapping[Any, Any]) -> Children:
    """The attributes of an object under their full names, in the order of the names."""
    return ((f"{name}.{key}", each) for key, each in sorted(attributes.items(), key=lambda pair: str(pair[0])))


def members(kind: type) -> dict[str, Any]:
    """The functions and values that a class itself defines."""
    return plain_members(vars(kind))


def plain_members(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a class without those that Python and torch give to it; Python makes empty annotations when asked."""
    shown = {key: each for key, each in attributes.items() if not isinstance(each, types.MemberDescriptorType)}
    return {key: each for key, each in shown.items() if key not in _GENERATED and (key, each) != ("__annotations__", {})}


def facts_of_code(code: types.CodeType) -> Iterator[tuple[object, ...]]:
    """The instructions, names and constants of code and of the functions in it, without the names of its file and lines."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable.hex()
    yield code.co_name, code.co_code.hex(), code.co_varnames, code.co_freevars, code.co_names, code.co_flags, *counts
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from facts_of_code(constant)
        else:
            yield tuple(sorted(map(repr, constant))) if isinstance(constant, frozenset) else (repr(constant),)


def names_in_code(code: types.CodeType) -> list[str]:
    """The names of globals and attributes that code uses, and the functions in it; each name once.

    Where code names `getattr`, its texts may be names too.
    """
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in names_in_code(each))
    texts = (each for each in code.co_consts if isinstance(each, str) and each.isidentifier() and "getattr" in code.co_names)
    return list(dict.fromkeys([*code.co_names, *texts, *inner]))


def is_looked_up(kind: type) -> bool:
    """Whether a class stands under its own name in its module, or is compiled; others are made by a program as it runs."""
    return not kind.__flags__ & _HEAP_TYPE or resolved(kind.__module__, kind.__qualname__) is kind


def resolved(module: str, path: str) -> Any:
    """The object at a dotted path in a module; None if there is none."""
    place: Any = sys.modules.get(module)
    for part in path.split("."):
        place = vars(place).get(part) if hasattr(place, "__dict__") else None
        place = place.__func__ if isinstance(place, staticmethod | classmethod) else place
    return place


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and the code of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_code_of_library(code: types.CodeType) -> bool:
    """Whether code stands in a file of a library, or was generated: a program may give its own code a library's globals."""
    return code.co_filename.startswith("<") or is_below_libraries(code.co_filename)


def reads_environment(value: Any) -> bool:
    """Whether a global is the process's environment, or the function that reads it."""
    return any(value is each for each in (os.environ, os.environb, os.getenv, os.getenvb))


def constants_in_code(code: types.CodeType) -> Iterator[Any]:
    """The constants of code and of the functions in it."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from constants_in_code(constant)
        else:
            yield constant


class ReachableCode:
    """Yields the named objects that code reaches. `note(*facts)` adds facts about the code to the digest of the walk."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._libraries: set[str] = set()
        self._read_modules: set[types.ModuleType] = set()  # with all their globals
        self.codes: set[types.CodeType] = set()  # the user's code that was read
        self.library_classes: set[type] = set()

    def of_class(self, name: str, kind: type) -> Children:
        """The functions and values of a class and its bases; of a class of a library the library's version."""
        self._note(name, kind.__module__, kind.__qualname__)
        if self._is_library(kind) and is_looked_up(kind):
            self.library_classes.add(kind)
            return
        yield from ((f"{name}.__bases__[{at}]", base) for at, base in enumerate(kind.__bases__))
        if type(kind) is not type:
            yield f"{name}.__class__", type(kind)
        yield from named(name, members(kind))
        self._note(name, *registered_with(kind))

    def of_python_module(self, name: str, module: types.ModuleType) -> Children:
        """Nothing further; a Python module that is a value of the user's own code raises `UnreadableError`."""
        if not self._is_library(module):
            raise UnreadableError(f"{name}, the Python module {module.__name__}")
        self._note(name, "module", module.__name__)
        return iter(())

    def of_function(self, name: str, function: types.FunctionType) -> Children:
        """The code of a function, its closure, defaults and attributes, and the globals that its code names."""
        self._note(name, function.__module__, function.__qualname__)
        for at, cell in enumerate(function.__closure__ or ()):
            yield f"{name}.<{function.__code__.co_freevars[at]}>", in_cell(cell)
        yield f"{name}.__defaults__", function.__defaults__
        yield f"{name}.__kwdefaults__", function.__kwdefaults__
        if self._is_library(function):
            return
        yield f"{name}.__dict__", vars(function)
        for facts in facts_of_code(function.__code__):
            self._note(*facts)
        names = names_in_code(function.__code__)
        self.codes.update(codes_in(function.__code__))
        asked = (PER_PROCESS | ENVIRONMENT | _BY_TEXT).intersection(names)
        if asked:
            raise UnreadableError(f"{name}, whose code names {min(asked)}")
        for used in names:
            found = global_named(function.__globals__, used, _MISSING)
            if reads_environment(found):
                raise UnreadableError(f"{name}, whose code names {used}, the environment")
            if found is not _MISSING and not isinstance(found, types.ModuleType):
                yield f"{function.__module__}.{used}", found
        for module, attribute in dict.fromkeys(module_uses(function.__code__, function.__globals__)):
            yield from self._in_module(module, attribute)

    def _in_module(self, module: types.ModuleType, attribute: str | None) -> Children:
        """The attribute that code reads of a Python module, all attributes for None; the version of a library."""
        self._note("module", module.__name__, attribute)
        if self._is_library(module):
            return
        found = vars(module).get(attribute, _MISSING) if attribute is not None else _MISSING
        if found is _MISSING:
            yield from self._all_of(module)
        elif not isinstance(found, types.ModuleType):
            yield f"{module.__name__}.{attribute}", found

    def _all_of(self, module: types.ModuleType) -> Children:
        """All globals of a module of the user, and of those that it imports."""
        if module in self._read_modules:
            return
        self._read_modules.add(module)
        for key, value in sorted(vars(module).items()):
            if key in _OF_IMPORT:
                continue
            if isinstance(value, types.ModuleType):
                self._note("module", module.__name__, key, value.__name__)
                if not self._is_library(value):
                    yield from self._all_of(value)
            else:
                yield f"{module.__name__}.{key}", value

    def _is_library(self, value: Any) -> bool:
        """Whether code belongs to Python or an installed library, whose version is noted here; then its text is not read."""
        root = top_package(value)
        if not is_installed(root) or (isinstance(value, types.FunctionType) and not is_code_of_library(value.__code__)):
            return False
        if root not in self._libraries:
            self._libraries.add(root)
            self._note(root, version(root))
        return True
