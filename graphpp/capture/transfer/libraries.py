"""Tell installed code from the user's: code of Python, graphpp and installed packages changes only with the version."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib"))

_GRAPHPP = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ""))


def top_package(value: Any) -> str:
    """The top package of a class, a function or a module."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__")  # `functools.wraps` copies `__module__`
        module = "collections" if str(module).startswith("namedtuple_") else module
    return str(module or "").partition(".")[0]


@functools.cache
def is_installed(root: str) -> bool:
    """Whether a top package is a part of Python, graphpp, or lies where pip installs packages."""
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    if root == "graphpp" or (root in sys.stdlib_module_names and not any(places)):
        return root != "__main__"  # a part of Python that is no file, or is not imported
    found = [os.path.realpath(place) for place in places if place is not None]
    return bool(found) and all(place.startswith(_LIBRARIES) for place in found)  # a namespace may have the user's parts too


@functools.cache
def is_below_libraries(file: str) -> bool:
    """Whether a file of Python code lies where Python or pip puts libraries, or belongs to graphpp."""
    return os.path.realpath(file).startswith((*_LIBRARIES, _GRAPHPP))


@functools.cache
def version(root: str) -> str:
    """The version of a top package: that of its distribution, else its own `__version__`, else "unknown"."""
    if root in sys.stdlib_module_names:
        return sys.version
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(root), "__version__", "unknown"))


def digest_of_file(file: str) -> str:
    """The digest of a file's bytes; empty if the file cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
