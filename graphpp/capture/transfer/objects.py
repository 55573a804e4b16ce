"""Kinds of Python objects, and their attributes, as two processes can compare them."""

from __future__ import annotations

import logging
import threading
import types
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from graphpp.capture.transfer.libraries import is_installed, top_package
from graphpp.capture.transfer.reachable_code import UnreadableError

SCALARS = (
    bool, int, float, complex, str, bytes, type(None), range, type(...), type(NotImplemented),
    torch.dtype, torch.layout, torch.memory_format,
)  # fmt: skip
_tuplegetter = type(vars(namedtuple("_Example", "field"))["field"])  # the attributes of named tuples
COMPILED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, _tuplegetter,
)  # fmt: skip
WITHOUT_EFFECT = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
_HASHES = 2**40  # integers of library objects from here on are taken for hashes or addresses


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, with those in slots; None for an object of a compiled class that shows none."""
    kind = type(value)
    slots = [(base, slot) for base in kind.__mro__ for slot in _slots(base) if slot not in ("__dict__", "__weakref__")]
    if not hasattr(value, "__dict__") and not slots:
        return None
    found = dict(getattr(value, "__dict__", {}))
    for base, slot in slots:
        mangled = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        if hasattr(value, mangled):
            found[slot] = getattr(value, mangled)
    if is_installed(top_package(kind)):
        return {key: each for key, each in found.items() if type(each) is not int or abs(each) < _HASHES}
    return found


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def text_in_set(name: str, value: Any) -> str:
    """The text by which an item of a set is compared: plain data, tuples and frozen sets of these, and classes of libraries.

    Raises `UnreadableError` for other items; `name` is the set's.
    """
    if type(value) in SCALARS:
        return repr(value)
    if type(value) is tuple:
        return f"({', '.join(text_in_set(name, each) for each in value)})"
    if type(value) is frozenset:
        return f"{{{', '.join(sorted(text_in_set(name, each) for each in value))}}}"
    if isinstance(value, type) and is_installed(top_package(value)):
        return f"{value.__module__}.{value.__qualname__}"
    raise UnreadableError(f"{name}, a set with a {type(value).__qualname__}")
