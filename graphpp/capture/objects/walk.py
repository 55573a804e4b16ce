"""One walk over the Python objects that the code of a model and a loss reads.

Contract
--------
- `Walk.items` yields (path, kind, value, place) of an object and all objects that it leads to: items of containers, attributes
  that the code names, closures, defaults, bound objects, hooks, members of classes, modules outside of the tree. `snapshot.py`
  compares the objects of a step by identity, `conditions.py` their values between steps, `digest.py` their values on ranks.
- A path begins with the index of a module in the tree, or the name of a Python module. An object, function, class or module
  that the walk meets again is an item with its `first` path, and is not entered again.
- Objects beyond `Limits` have the kind "same". Code, classes and state of libraries (`names.is_of_library`) are not entered;
  attributes of a library's object are. Objects given to `graphpp.unwatched` are not entered.
"""

from __future__ import annotations

import logging
import re
import struct
import sys
import threading
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, partial
from numbers import Number
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphpp._torch import aot
from graphpp._torch.operators.flex_attention import is_block_mask
from graphpp._torch.parallel.sharded_tensor import is_placement
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.capture.objects.names import comes_with_torch, in_cell, is_implicit, is_of_library, names_of_torch
from graphpp.capture.objects.unwatched import is_unwatched

Path = tuple[Any, ...]
Place = tuple[Any, str]  # (namespace or object with slots, name)
Parts = Iterator[tuple[Any, Any, Place | None]]  # (last path element, object, place)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
_ALL_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype))
_OF_OBJECTS = (MethodType, partial, staticmethod, classmethod, property, cached_property, _lru_cache_wrapper)
_COMPILED = (
    BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, GetSetDescriptorType,
    MemberDescriptorType, ClassMethodDescriptorType, aot.Operator, aot.OperatorPacket,
)  # fmt: skip
_KINDS: Sequence[tuple[Any, str]] = (
    ((Enum, Number, str, bytes, PurePath), "plain"),  # such as an `IntEnum`
    (torch.Tensor, "tensor"),
    (nn.Module, "module"),
    ((logging.Logger, type(threading.Lock()), type(threading.RLock()), ModuleType), "ignored"),
    ((dict, MappingProxyType), "mapping"),
    ((list, tuple, deque), "sequence"),
    (Set, "set"),
    (FunctionType, "function"),
    (_OF_OBJECTS, "wrapper"),
    (_COMPILED, "name"),
    (type, "class"),
    (ContextVar, "variable"),
    (weakref.ref, "wrapper"),
    ((torch.device, torch.layout, torch.memory_format, slice, range, re.Pattern, EllipsisType, NotImplementedType), "text"),
    ((dist.ProcessGroup, DeviceMesh), "ranks"),
    ((threading.local, SimpleNamespace), "object"),
)
_ONCE = ("function", "object", "class", "module")  # torch.export may replace containers by equal ones
_WRAPPED = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__")
_PLAIN_ACCESS: Any = object.__getattribute__
_PLACE = struct.calcsize("P")  # bytes of a pointer


class Item(NamedTuple):
    """An object. `place`: the attribute or global variable that refers to it. `first`: its path when the walk first met it."""

    path: Path
    kind: str
    value: Any
    place: Place | None = None
    first: Path | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of a walk: levels of nesting, items of a container, bytes of a NumPy array, number of objects."""

    depth: int = 6
    items: int = 1_000
    array: int = 65_536
    objects: int = 50_000


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array or scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def kind_of(value: Any) -> str:
    """The kind of an object, which decides how it is entered and compared."""
    if type(value) in PLAIN:
        return "plain"
    if is_array(value):
        return "same" if value.dtype.hasobject else "array"
    kind = next((kind for types, kind in _KINDS if isinstance(value, types)), None)
    if kind in ("function", "class") and is_of_library(value):
        return "name"
    if kind is not None:
        return kind
    if is_placement(value) or hasattr(type(value), "__members__"):  # an enumeration of C++, such as SDPBackend
        return "text"
    return "same" if _is_hiding(type(value)) or attributes(value) is None else "object"


def _is_hiding(kind: type) -> bool:
    """Whether objects of a class have native state: they are larger than their attributes and slots need.

    `__dict__` and weak references take a pointer each, unless the offset is negative: then Python manages them.
    """
    slots = sum(len(_slots(base)) for base in kind.__mro__)
    places = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + places * _PLACE


def attributes(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, empty if it has only slots; None if reading it raises."""
    try:
        held: dict[str, Any] = vars(value)
    except TypeError:
        return {}
    except Exception:  # code of the class
        return None
    return held


class Walk:
    """Walks over objects. `names`: those that the code reads. `tree`: the paths of modules and their tensors, by `id`."""

    def __init__(self, names: Set[str], tree: Mapping[int, Path], limits: Limits) -> None:
        self._names, self._limits = names, limits
        self._seen: dict[int, tuple[Path, Any]] = {key: (path, None) for key, path in tree.items()}
        self._objects = 0
        self._parts: Mapping[str, Callable[[Any], Parts]] = {
            "mapping": _of_mapping,
            "sequence": lambda value: ((at, each, None) for at, each in enumerate(value)),
            "function": _of_function,
            "wrapper": _of_wrapper,
            "variable": lambda variable: iter([("get()", variable.get(None), None)]),
            "object": self._of_object,
            "class": self._of_class,
            "module": self._of_module,
        }

    def items(self, path: Path, value: Any, place: Place | None = None, depth: int | None = None) -> Iterator[Item]:
        """The object and all objects that it leads to, depth first."""
        depth = self._limits.depth if depth is None else depth
        if type(value) in SYMBOLIC:  # a size that an earlier trace left in the object counts as its number
            value = hint(value)
        kind = "ignored" if is_unwatched(value) else kind_of(value)
        self._objects += kind != "plain"
        if self._is_beyond(kind, value, depth):
            kind = "same"
        elif kind in (*_ONCE, "tensor") and id(value) in self._seen:
            yield Item(path, kind, value, place, self._seen[id(value)][0])
            return
        elif kind in _ONCE:
            self._seen[id(value)] = path, value
        yield Item(path, kind, value, place)
        if kind in self._parts:
            below = depth if isinstance(value, MethodType | staticmethod | classmethod) else depth - 1
            for step, each, where in self._parts[kind](value):
                yield from self.items((*path, step), each, where, below)

    def _is_beyond(self, kind: str, value: Any, depth: int) -> bool:
        if kind == "array":
            return bool(value.nbytes > self._limits.array)
        if kind in ("mapping", "sequence", "set") and len(value) > self._limits.items:
            return True
        return kind in self._parts and (depth == 0 or self._objects > self._limits.objects)

    def tree_module(self, path: Path, module: nn.Module, tensors: Sequence[str]) -> Iterator[Item]:
        """A module of the tree without its submodules. `tensors`: the kinds of its parameters and its buffers."""
        yield Item(path, "module", module)
        for store, kind in zip(("_parameters", "_buffers"), tensors, strict=True):
            for name, tensor in getattr(module, store).items():
                if tensor is not None:
                    yield Item((*path, name), kind, tensor)
        for step, each, where in self._own_parts(module):
            yield from self.items((*path, step), each, where)

    def _of_module(self, module: nn.Module) -> Parts:
        """The parts of a module outside of the tree, whose tensors are constants of a graph."""
        for store in ("_parameters", "_buffers", "_modules"):
            yield from ((name, each, None) for name, each in getattr(module, store).items())
        yield from self._own_parts(module)

    def _own_parts(self, module: nn.Module) -> Parts:
        """A module's hooks, class and attributes: tensors and `forward` always, others if the code names them.

        The code is that of the user, and for a module of torch that of its class.
        """
        if is_unwatched(module):
            return
        kind: Any = type(module)  # for mypy `nn.Module` has no hash
        names = self._names | names_of_torch(kind)
        for name, value in vars(module).items():
            always = name == "forward" or type(value) is torch.Tensor
            if name not in _ALL_REGISTRIES and (always or name in names):
                yield name, value, None
        for kind in HOOKS:
            for at, (key, hook) in enumerate(getattr(module, kind).items()):
                with_kwargs = key in getattr(module, f"{kind}_with_kwargs", ())
                yield f"{kind}[{at}]{' with keyword arguments' * with_kwargs}", hook, None
        yield "__class__", type(module), None

    def _of_object(self, value: Any) -> Parts:
        """An object's class and the attributes that the code names; also the data of UserDict and the like."""
        kind, held = type(value), attributes(value) or {}
        computes = kind.__getattribute__ is not _PLAIN_ACCESS or hasattr(kind, "__getattr__")  # by other names
        computes |= is_block_mask(value)  # read by torch
        inner = ("data", "maps") if isinstance(value, UserDict | UserList | ChainMap) else ()
        for name in list(held):
            if computes or name in self._names or name in inner:
                yield name, held[name], (held, name)
        for base in kind.__mro__:
            for name in _slots(base):
                yield name, getattr(value, name, None), (value, name)
        yield "__class__", kind, None

    def _of_class(self, kind: type) -> Parts:
        """The members of a class and its bases that the code names or Python calls implicitly."""
        if not comes_with_torch(type(kind)):
            yield "__class__", type(kind), None
        for base in kind.__mro__:
            library, space = is_of_library(base), vars(base)
            for name, value in list(space.items()):
                if name == "forward" or (not library and (name in self._names or is_implicit(name, value))):
                    yield f"{base.__qualname__}.{name}", value, (space, name)


def _of_mapping(value: Mapping[Any, Any]) -> Parts:
    for at, (key, each) in enumerate(value.items()):
        if type(key) in PLAIN:
            yield key, each, None
        else:
            yield f"key {at}", key, None
            yield f"value {at}", each, None


def _of_function(function: FunctionType) -> Parts:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"<{name}>", in_cell(cell), None) for name, cell in cells)
    yield "__defaults__", function.__defaults__ or (), None
    yield "__kwdefaults__", function.__kwdefaults__ or {}, None
    yield "__dict__", vars(function), None


def _of_wrapper(value: Any) -> Parts:
    if isinstance(value, weakref.ref):
        yield "()", value(), None
    yield from ((part, getattr(value, part), None) for part in _WRAPPED if getattr(value, part, None) is not None)


def _slots(base: type) -> list[str]:
    declared = vars(base).get("__slots__", ())
    names = [declared] if isinstance(declared, str) else list(declared)
    own = f"_{base.__name__.lstrip('_')}"
    return [
        f"{own}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]

