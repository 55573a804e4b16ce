"""The attributes of the modules and classes of libraries as they were before a capture, which may change them.

Contract: `LibraryState.now()` copies the attributes of modules and classes, one level deep: later `of_module` and `of_class`
tell the values that the names had. Modules and classes that are new since then have their present attributes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpp.capture.transfer.libraries import is_installed


@dataclass(frozen=True)
class LibraryState:
    """Copies of the attributes of modules, by name, and of classes."""

    modules: Mapping[str, Mapping[str, Any]]
    classes: Mapping[type, Mapping[str, Any]]

    @classmethod
    def now(cls) -> LibraryState:
        """The attributes of all modules of installed libraries but Python's own, and of the classes in them."""
        found = {name: module for name, module in list(sys.modules.items()) if _is_of_library(name, module)}
        modules = {name: dict(vars(module)) for name, module in found.items()}
        classes = {each for values in modules.values() for each in values.values() if issubclass(type(each), type)}
        return cls(modules, {kind: dict(vars(kind)) for kind in classes})

    def of_module(self, name: str) -> Mapping[str, Any]:
        """The attributes that a module had."""
        return self.modules[name] if name in self.modules else vars(sys.modules[name])

    def of_class(self, kind: type) -> Mapping[str, Any]:
        """The attributes that a class had."""
        return self.classes[kind] if kind in self.classes else vars(kind)


def _is_of_library(name: str, module: object) -> bool:
    root = name.partition(".")[0]
    return isinstance(module, types.ModuleType) and root not in sys.stdlib_module_names and is_installed(root)
