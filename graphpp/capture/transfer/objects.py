"""Kinds of Python objects, and their attributes, as two processes can compare them."""

from __future__ import annotations

import abc
import logging
import struct
import threading
import types
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpp.capture.transfer.libraries import is_installed, top_package
from graphpp.capture.transfer.names_asked import UnreadableError

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
_dump: Callable[[type], Any] = vars(abc)["_get_dump"]  # the classes registered with an abstract class, and its caches
_PLACE = struct.calcsize("P")  # the bytes of a pointer
_HASHES = 2**40  # integers of library objects from here on are taken for hashes or addresses


def state_of_logger(logger: logging.Logger) -> tuple[object, ...]:
    """What a program may ask of a logger to decide what it computes."""
    return logger.name, logger.getEffectiveLevel(), logger.disabled, logger.manager.disable


def registered_with(kind: type) -> list[str]:
    """The names of the classes that a program has registered with an abstract class."""
    registry = _dump(kind)[0] if isinstance(kind, abc.ABCMeta) else ()
    found = [each() for each in registry]
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in found if each is not None)


def is_hiding(kind: type) -> bool:
    """Whether objects of a class have state of compiled code, beside attributes and slots: they are larger than these need.

    Attributes and weak references take a place each, unless the class says (with a negative number) that Python manages it.
    """
    slots = sum(slot not in ("__dict__", "__weakref__") for base in kind.__mro__ for slot in _slots(base))
    places = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + places * _PLACE


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


def place_of(tensor: torch.Tensor) -> Any:
    """Equal for a tensor and its detached alias: address, dtype, shape and strides."""
    address = tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else id(tensor)
    return address, tensor.dtype, tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
