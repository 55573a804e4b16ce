"""The attributes of the modules and classes of libraries as they were before a capture, which may change them.

Contract: `LibraryState.now()` copies the attributes of modules and classes, one level deep: later `of_module` and `of_class`
tell the values that the names had, and `registered_with` the classes that an abstract class had then: the libraries that a
capture loads register further ones. Modules and classes that are new since then have their present attributes.
"""

from __future__ import annotations

import sys
import types
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpp.capture.transfer import objects
from graphpp.capture.transfer.libraries import is_installed


@dataclass(frozen=True)
class LibraryState:
    """Copies of the attributes of modules, by name, and of classes; the names of the classes registered with abstract ones."""

    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    classes: Mapping[type, Mapping[str, Any]] = field(default_factory=dict)
    registered: Mapping[type, list[str]] = field(default_factory=dict)

    @classmethod
    def now(cls) -> LibraryState:
        """The attributes of all modules of installed libraries but Python's own, and of the classes in them."""
        found = {name: module for name, module in list(sys.modules.items()) if _is_of_library(name, module)}
        modules = {name: dict(vars(module)) for name, module in found.items()}
        classes = {each for values in modules.values() for each in values.values() if issubclass(type(each), type)}
        bases = {base for kind in classes for base in kind.__mro__ if isinstance(base, ABCMeta)}
        registered: dict[type, list[str]] = {base: objects.registered_with(base) for base in bases}
        return cls(modules, {kind: dict(vars(kind)) for kind in classes}, registered)

    def of_module(self, name: str) -> Mapping[str, Any]:
        """The attributes that a module had."""
        return self.modules[name] if name in self.modules else vars(sys.modules[name])

    def of_class(self, kind: type) -> Mapping[str, Any]:
        """The attributes that a class had."""
        return self.classes[kind] if kind in self.classes else vars(kind)

    def registered_with(self, kind: type) -> list[str]:
        """The names of the classes that were registered with an abstract class."""
        return self.registered[kind] if kind in self.registered else objects.registered_with(kind)


def _is_of_library(name: str, module: object) -> bool:
    root = name.partition(".")[0]
    return isinstance(module, types.ModuleType) and root not in sys.stdlib_module_names and is_installed(root)
