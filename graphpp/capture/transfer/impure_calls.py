"""Tell whether compiled code of Python that runs in a forward reads what no key has: files, clocks, the process.

Contract: `asks_outside` is true for a function of Python's that reads files, clocks, random numbers, sockets or facts of the
process, if code of the user or of an installed library other than torch's machinery calls it, directly or through Python's own
library. Imports, warnings and logs read files too, and do not count.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

_OUTSIDE = frozenset(
    ("io", "_io", "posix", "nt", "time", "_random", "_socket", "socket", "select", "mmap", "fcntl", "resource", "_ctypes",
     "_posixsubprocess", "_sqlite3", "sqlite3", "gc", "pwd", "_uuid", "_locale", "_datetime", "datetime")
)  # fmt: skip
_PURE = frozenset(("fspath", "_path_normpath", "_path_splitroot", "_path_splitroot_ex", "text_encoding"))
_READERS = frozenset(("fromfile", "from_file"))  # of NumPy and torch
_BESIDE = ("importlib", "warnings", "logging", "linecache", "traceback", "tokenize", "inspect")  # of Python's own library


def asks_outside(function: Any, frame: types.FrameType, is_machinery: Callable[[str], bool], roots: frozenset[str]) -> bool:
    """Whether a compiled function reads from outside of the process's objects, for code of the user or of a library.

    `roots` are the packages of Python's own library; `is_machinery` tells the modules that trace.
    """
    name = getattr(function, "__name__", "")
    if name not in _READERS and (_module_of(function) not in _OUTSIDE or name in _PURE):
        return False
    return calls_for_program(frame, is_machinery, roots)


def calls_for_program(frame: types.FrameType, is_machinery: Callable[[str], bool], roots: frozenset[str]) -> bool:
    """Whether the code in a frame runs for code of the user or of a library, directly or through Python's own library."""
    caller: types.FrameType | None = frame
    while caller is not None:
        module = str(caller.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root in _BESIDE:
            return False
        if root not in roots:
            return not is_machinery(module)
        caller = caller.f_back
    return False


def _module_of(function: Any) -> str | None:
    """The module of a compiled function, or of the class whose method it is."""
    own = getattr(function, "__self__", None)
    if own is None or isinstance(own, types.ModuleType):
        return getattr(function, "__module__", None)
    return (own if isinstance(own, type) else type(own)).__module__
