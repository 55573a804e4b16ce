"""Note the code that runs in the forward of model and loss, and tell whether another process would run the same code.

`reachable.py` reads the user's code, and takes an installed library for unchanged as long as the version is the same. That is
not enough to keep a graph for later runs: a program may replace functions of a library, or change the library's files.

Contract
--------
- `CodeTrail.watching()` notes every Python function that runs, but for those of torch that trace, of graphpp and of Python.
- `CodeTrail.evidence(held)` is plain data: a digest of each library function that ran, of each global of a library that code
  names, of the library classes whose methods ran, of the files of all these, and of environment variables. It raises
  `UnreadableError` where another process cannot be compared: user code ran that the walk `held` has not read, an object of the
  user stands in a library, the forward imported user code, a custom Function of a library has a backward that did not run,
  or code asks which process runs it.
- `first_difference(evidence)` names the first of these that is another one in this process, or returns None.
- `library_digests.py` says which values of a library count.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphpp._torch import aot
from graphpp.capture.transfer.impure_calls import asks_outside, calls_for_program
from graphpp.capture.transfer.libraries import digest_of_file, is_installed, top_package, version
from graphpp.capture.transfer.library_digests import Digests
from graphpp.capture.transfer.library_state import LibraryState
from graphpp.capture.transfer.module_uses import module_uses
from graphpp.capture.transfer.names_asked import ENVIRONMENT, HIDDEN, KNOWN_QUERIES, PER_PROCESS, UnreadableError
from graphpp.capture.transfer.reachable import Reachable
from graphpp.capture.transfer.reachable_code import (
    constants_in_code,
    is_code_of_library,
    names_in_code,
    reads_environment,
    resolved,
)

Evidence = Mapping[str, Mapping[str, Mapping[str, str]]]

# The parts of torch that trace, dispatch and interpret: they run for every model alike.
_MACHINERY = (
    "torch._", "torch.fx.", "torch.utils._", "torch.export.", "torch.overrides", "torch.library", "torch.types",
    "torch.backends", "torch.autograd.grad_mode", "torch.autograd.profiler", "torch.autograd.graph",
)  # fmt: skip
OPERATORS_OF_TORCH = ("aten.", "prims.", "_c10d_functional.")  # the operators whose code comes with torch
_KNOWN_OPERATORS = (*OPERATORS_OF_TORCH, "graphpp.")
_LOOKED_UP = ("code", "global", "class")  # the kinds of evidence that are looked up in modules
_KINDS = (*_LOOKED_UP, "environ", "file", "version")
_OF_PYTHON = frozenset(root for root in sys.stdlib_module_names)
_OPERATOR_CALLS = frozenset(kind.__call__.__code__ for kind in (aot.OperatorPacket, aot.OperatorWithSchema))
_GENERATED = "torch.autograd.function"  # where torch puts the classes that it makes for custom operators and Functions


class CodeTrail:
    """The functions that ran, with the classes of the objects whose methods they are."""

    def __init__(self) -> None:
        self._refused: str | None = None
        self._globals: dict[types.CodeType, dict[str, Any]] = {}
        self._receivers: set[type] = set()
        self._skipped: set[types.CodeType] = set()
        self._cached: set[types.CodeType] = set()  # of functions with cached results
        self._modules = set(sys.modules)
        self._before = LibraryState.now()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The context in which the functions of this thread are noted."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def refuse(self, reason: str) -> None:
        """Let `evidence` raise `UnreadableError`, because code ran that was not noted."""
        self._refused = reason

    def _note(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and self._refused is None and asks_outside(function, frame, _is_machinery, _OF_PYTHON):
            caller = frame.f_code.co_qualname
            self._refused = f"{caller}, which asks {getattr(function, '__name__', '')} for what is outside of the program"
        code = frame.f_code
        if event == "call" and code in _OPERATOR_CALLS and not str(frame.f_locals["self"]).startswith(_KNOWN_OPERATORS):
            self.refuse(f"the operator {frame.f_locals['self']}")
        if event != "call" or code in self._skipped:
            return
        if code not in self._globals:
            module = str(frame.f_globals.get("__name__", ""))
            if _is_machinery(module) or module.startswith("namedtuple_"):
                if code.co_name != "getenv" and "environ" in code.co_names and module.partition(".")[0] in _OF_PYTHON:
                    if calls_for_program(frame, _is_machinery, _OF_PYTHON):
                        self.refuse(f"{module}.{code.co_qualname}, which reads the environment")
                else:
                    self._skipped.add(code)
                return
            self._globals[code] = frame.f_globals
        if code.co_argcount:
            receiver = frame.f_locals.get(code.co_varnames[0])
            kind = receiver if isinstance(receiver, type) else type(receiver)
            if hasattr(kind, code.co_name):
                self._receivers.add(kind)

    def evidence(self, held: Reachable) -> Evidence:
        """Digests by kind, module and name; `held` is the walk over model and loss. Raises `UnreadableError`."""
        if self._refused is not None:
            raise UnreadableError(self._refused)
        for module in sys.modules.keys() - self._modules:
            if not is_installed(module.partition(".")[0]) and not _is_of_cython(module):
                raise UnreadableError(f"the module {module}, which the forward imports")
        digests = Digests(self._before)
        found: dict[str, dict[str, dict[str, str]]] = {kind: {} for kind in _KINDS}
        for code, around in self._globals.items():
            module = _module_of(around)
            if is_installed(module.partition(".")[0]) and is_code_of_library(code):
                self._read_library(code, module, digests, found)
            elif not held.has_read(code):
                raise UnreadableError(f"{module}.{code.co_qualname}, which model and loss reach in a way that cannot be seen")
            else:
                _check_user_code(code, module, around)
            self._read_globals(around, names_in_code(code), digests, found)
            _read_uses(code, around, digests, found)
        for receiver in self._receivers | held.library_classes:
            _read_receiver(receiver, held, digests, found)
        modules = {module for kind in _LOOKED_UP for module in found[kind]}
        found["version"] = {root: {"": version(root)} for root in {module.partition(".")[0] for module in modules}}
        files = {getattr(sys.modules[module], "__file__", None) for module in modules}
        found["file"] = {file: {"": digest_of_file(file)} for file in files if file is not None}
        return found

    def _read_library(
        self, code: types.CodeType, module: str, digests: Digests, found: dict[str, dict[str, dict[str, str]]]
    ) -> None:
        """Put a library function that ran, and the variables that its code names, into `found`."""
        names = names_in_code(code)
        asked = (PER_PROCESS | {"globals"}).intersection(names)
        if asked:
            raise UnreadableError(f"{module}.{code.co_qualname}, whose code names {min(asked)}")
        if ENVIRONMENT.intersection(names):
            texts = [each for each in constants_in_code(code) if isinstance(each, str)]
            variables = [text for text in texts if text.isidentifier() and text.isupper()]
            if not variables:
                raise UnreadableError(f"{module}.{code.co_qualname}, which reads the environment")
            found["environ"].setdefault("os", {}).update({name: digests.of(os.environ.get(name)) for name in variables})
        if getattr(resolved(module, code.co_qualname), "__code__", None) is code:
            found["code"].setdefault(module, {})[code.co_qualname] = digests.of_code(code)
        for kind in _classes_around(module, code.co_qualname):
            self._receivers.add(kind)
            if issubclass(kind, torch.autograd.Function) and not module.startswith("torch."):
                raise UnreadableError(f"{module}.{kind.__qualname__}, whose backward has not run")

    def _read_globals(
        self, around: Mapping[str, Any], names: list[str], digests: Digests, found: dict[str, dict[str, dict[str, str]]]
    ) -> None:
        """Put the globals of libraries that code names into `found`; the walk has read those of the user's modules."""
        for owner, name in _globals_named(around, names, set()):
            if not is_installed(owner.partition(".")[0]):
                continue
            value = self._before.of_module(owner).get(name, vars(sys.modules[owner])[name])
            if value is sys.modules:
                raise UnreadableError(f"code of {around['__name__']}, which reads sys.modules")
            if reads_environment(value) and name not in ENVIRONMENT:
                raise UnreadableError(f"{owner}.{name}, which reads the environment")
            found["global"].setdefault(owner, {})[name] = digests.of(value)
            if isinstance(value, functools._lru_cache_wrapper):
                self._read_cached(value.__wrapped__, digests, found)

    def _read_cached(self, function: Any, digests: Digests, found: dict[str, dict[str, dict[str, str]]]) -> None:
        """Count the code of a library's function with cached results as code that has run, because its results may be older."""
        code = getattr(function, "__code__", None)
        if code is None or code in self._cached or code in self._globals:
            return
        self._cached.add(code)
        module = _module_of(function.__globals__)
        if is_installed(module.partition(".")[0]) and not _is_machinery(module):
            self._read_library(code, module, digests, found)
            self._read_globals(function.__globals__, names_in_code(code), digests, found)


def _check_user_code(code: types.CodeType, module: str, around: Mapping[str, Any]) -> None:
    """Raise `UnreadableError` for code of the user that finds objects in a way that the walk does not follow.

    So does a query for a state of torch that no key has.
    """
    asked = HIDDEN.intersection(names_in_code(code))
    of_torch = [name for owner, name in module_uses(code, around) if name and owner.__name__.startswith("torch")]
    asked |= {name for name in of_torch if name.startswith(("is_", "get_", "are_")) and name not in KNOWN_QUERIES}
    if asked:
        raise UnreadableError(f"{module}.{code.co_qualname}, whose code names {min(asked)}")


def _read_uses(
    code: types.CodeType, around: Mapping[str, Any], digests: Digests, found: dict[str, dict[str, dict[str, str]]]
) -> None:
    """Put what code reads of the modules of libraries into `found`: the attributes that it names, or all of them.

    It may read all if it uses the module as a value, such as in `getattr`.
    """
    for module, attribute in set(module_uses(code, around)):
        if is_installed(module.__name__.partition(".")[0]) and sys.modules.get(module.__name__) is module:
            values = {key: each for key, each in vars(module).items() if not key.startswith("__")}
            chosen = values if attribute is None else {attribute: values.get(attribute, module)}
            plain = {key: each for key, each in chosen.items() if not isinstance(each, types.ModuleType)}
            found["global"].setdefault(module.__name__, {}).update({key: digests.of(each) for key, each in plain.items()})


def _read_receiver(receiver: type, held: Reachable, digests: Digests, found: dict[str, dict[str, dict[str, str]]]) -> None:
    """Put a library class whose methods ran into `found`."""
    module, name = receiver.__module__, receiver.__qualname__
    if _is_machinery(module) or module == _GENERATED or held.has_walked(receiver):
        return
    if resolved(module, name) is not receiver or not is_installed(top_package(receiver)):
        raise UnreadableError(f"the class {module}.{name}, which another process cannot look up")
    found["class"].setdefault(module, {})[name] = digests.of(receiver)


def first_difference(evidence: Evidence) -> str | None:
    """The name of the first function, global, class, variable, file or version that is another one here; None if there is none.

    A module that this process has not imported counts as its file: nobody can have replaced anything in the module.
    """
    digests = Digests()
    for root, versions in evidence["version"].items():
        if version(root) != versions[""]:
            return f"the version of {root}"
    for file, digest in evidence["file"].items():
        if digest_of_file(file) != digest[""]:
            return f"the file {file}"
    for name, value in evidence["environ"].get("os", {}).items():
        if digests.of(os.environ.get(name)) != value:
            return f"the environment variable {name}"
    looked_up = ((kind, module, names) for kind in _LOOKED_UP for module, names in evidence[kind].items())
    return next(filter(None, (_difference_in(kind, module, names, digests) for kind, module, names in looked_up)), None)


def _difference_in(kind: str, module: str, names: Mapping[str, str], digests: Digests) -> str | None:
    """The name of the first of a module's functions, globals or classes that is another one in this process."""
    if module not in sys.modules:
        return None
    for name, digest in names.items():
        value = vars(sys.modules[module]).get(name, _missing) if kind == "global" else resolved(module, name)
        code = getattr(value, "__code__", None) if kind == "code" else None
        if digest != (digests.of(value) if code is None else digests.of_code(code)):
            return f"{module}.{name}"
    return None


def _missing() -> None:
    """Stands for a global that is missing."""


def _is_of_cython(module: str) -> bool:
    """Whether a module is one that Cython makes, without a file, when the first of its extension modules is imported."""
    return module.startswith(("cython_runtime", "_cython_")) and getattr(sys.modules[module], "__spec__", None) is None


def _is_machinery(module: str) -> bool:
    root = module.partition(".")[0]
    return module.startswith(_MACHINERY) or root == "graphpp" or (root in sys.stdlib_module_names and is_installed(root))


def _module_of(around: Mapping[str, Any]) -> str:
    """The name of the module that has these globals."""
    name = str(around.get("__name__"))
    if getattr(sys.modules.get(name), "__dict__", None) is not around:
        raise UnreadableError(f"code of {name}, which is no module of the process")
    return name


def _classes_around(module: str, path: str) -> Iterator[type]:
    """The classes in whose bodies a function stands, by the function's qualified name."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        found = resolved(module, ".".join(parts[:end]))
        if isinstance(found, type):
            yield found


def _globals_named(around: Mapping[str, Any], names: list[str], within: set[str]) -> Iterator[tuple[str, str]]:
    """(module, name) of each global that code names, and of each attribute that the code names of a module among these."""
    module = str(around["__name__"])
    within.add(module)
    for name in names:
        value = around.get(name, _missing)
        if value is _missing:
            if name in vars(builtins):
                yield "builtins", name
            continue
        yield module, name
        if isinstance(value, types.ModuleType) and value.__name__ not in within and value.__name__ in sys.modules:
            yield from _globals_named(vars(value), names, within)
