"""Tell installed code from the user's: code of Python, graphpp and installed packages changes only with the version."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import sysconfig
import types
from typing import Any

_LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib"))


def top_package(value: Any) -> str:
    """The top package of a class, a function or a module."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__")  # `functools.wraps` copies `__module__`
    return str(module or "").partition(".")[0]


@functools.cache
def is_installed(root: str) -> bool:
    """Whether a top package is a part of Python, graphpp, or lies where pip installs packages."""
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    if root == "graphpp" or (root in sys.stdlib_module_names and not any(places)):
        return root != "__main__"  # a part of Python that is no file, or is not imported
    return any(place is not None and os.path.realpath(place).startswith(_LIBRARIES) for place in places)


@functools.cache
def version(root: str) -> str:
    """The version of a top package: that of its distribution, else its own `__version__`, else "unknown"."""
    if root in sys.stdlib_module_names:
        return sys.version
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(root), "__version__", "unknown"))
