"""One walk over the Python objects that the code of a model and a loss reads.

Contract
--------
- `Walk.items` yields (path, kind, value, place) of an object and of the objects that it leads to: items of containers,
  attributes for whose names the code asks, closures, defaults, bound objects, hooks, members of classes, modules outside of the
  tree. `snapshot.py` notes the objects of a step by identity, `conditions.py` compares their values between steps, and
  `capture/transfer/digest.py` compares ranks.
- A path begins with the index of a module in the tree, or the name of a Python module. An object, function, class or module
  that the walk meets a second time is an item with its `first` path, and is not entered again.
- Beyond `Limits` objects have the kind "same". Code, classes and state of libraries (`names.is_of_library`) are not entered;
  attributes of a library's object are.
"""

from __future__ import annotations

import logging
import re
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
from graphpp._torch.parallel.sharded_tensor import is_placement
from graphpp.capture.objects.names import comes_with_torch, in_cell, is_implicit, is_of_library

Path = tuple[Any, ...]
Place = tuple[Any, str]  # a namespace, or an object with slots, and a name in it
Parts = Iterator[tuple[Any, Any, Place | None]]  # the last element of the path, the object, its place

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
_ONCE = ("function", "object", "class", "module")  # containers may be exchanged for equal ones, as torch.export does
_WRAPPED = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__")
_PLAIN_ACCESS: Any = object.__getattribute__
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: the class was made by a program, not compiled


class Item(NamedTuple):
    """An object of the program. `place`: the attribute of an object or class, or the global variable, that holds it.

    `first`: the path under which the walk has met the object before.
    """

    path: Path
    kind: str
    value: Any
    place: Place | None = None
    first: Path | None = None


@dataclass(frozen=True)
class Limits:
    """How far a walk goes: levels of containers and objects, items of a container, bytes of a NumPy array, all objects."""

    depth: int = 4
    items: int = 1_000
    array: int = 65_536
    objects: int = 50_000


def is_array(value: Any) -> bool:
    """Whether a value is NumPy's array or number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def kind_of(value: Any) -> str:
    """The kind of an object, by which it is followed and compared."""
    if type(value) in PLAIN:
        return "plain"
    if is_array(value):
        return "same" if value.dtype.hasobject else "array"
    kind = next((kind for types, kind in _KINDS if isinstance(value, types)), None)
    if kind in ("function", "class") and is_of_library(value):
        return "name"
    if kind is not None:
        return kind
    if is_placement(value):
        return "text"
    compiled = next(base for base in type(value).__mro__ if not base.__flags__ & _HEAP_TYPE)
    return "object" if compiled is object and attributes(value) is not None else "same"


def attributes(value: Any) -> dict[str, Any] | None:
    """The namespace of an object, empty for one with slots alone; None if the object's class refuses."""
    try:
        held: dict[str, Any] = vars(value)
    except TypeError:
        return {}
    except Exception:  # code of the class
        return None
    return held


class Walk:
    """Walks over objects. `names`: for which the code asks. `tree`: the paths of the modules of model and loss, by identity."""

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
        """An object and all objects that it leads to, depth first."""
        depth = self._limits.depth if depth is None else depth
        kind = kind_of(value)
        self._objects += kind != "plain"
        if self._is_beyond(kind, value, depth):
            kind = "same"
        elif kind in _ONCE:
            if id(value) in self._seen:
                yield Item(path, kind, value, place, self._seen[id(value)][0])
                return
            self._seen[id(value)] = path, value
        yield Item(path, kind, value, place)
        if kind in self._parts:
            below = depth if isinstance(value, MethodType) else depth - 1
            for step, each, where in self._parts[kind](value):
                yield from self.items((*path, step), each, where, below)

    def _is_beyond(self, kind: str, value: Any, depth: int) -> bool:
        """Whether the limits keep the walk from an object."""
        if kind == "array":
            return bool(value.nbytes > self._limits.array)
        if kind in ("mapping", "sequence", "set") and len(value) > self._limits.items:
            return True
        return kind in self._parts and (depth == 0 or self._objects > self._limits.objects)

    def tree_module(self, path: Path, module: nn.Module, tensors: Sequence[str]) -> Iterator[Item]:
        """A module of the tree, without its submodules. `tensors`: the kinds of its parameters and of its buffers."""
        yield Item(path, "module", module)
        for store, kind in zip(("_parameters", "_buffers"), tensors, strict=True):
            for name, tensor in getattr(module, store).items():
                if tensor is not None:
                    yield Item((*path, name), kind, tensor)
        for step, each, where in self._own_parts(module):
            yield from self.items((*path, step), each, where)

    def _of_module(self, module: nn.Module) -> Parts:
        """The parts of a module outside of the tree; its tensors are constants of a graph."""
        for store in ("_parameters", "_buffers", "_modules"):
            yield from ((name, each, None) for name, each in getattr(module, store).items())
        yield from self._own_parts(module)

    def _own_parts(self, module: nn.Module) -> Parts:
        """A module's hooks, class and attributes: plain data and `forward` always, others if the code asks for their names.

        Code of torch's own modules is not read, so all attributes of such a module are followed.
        """
        of_torch = any(base.__module__.startswith("torch.") and base is not nn.Module for base in type(module).__mro__)
        for name, value in vars(module).items():
            always = name == "forward" or type(value) in PLAIN or type(value) is torch.Tensor
            if name not in _ALL_REGISTRIES and (always or of_torch or name in self._names):
                yield name, value, None
        for kind in HOOKS:
            for at, (key, hook) in enumerate(getattr(module, kind).items()):
                with_kwargs = key in getattr(module, f"{kind}_with_kwargs", ())
                yield f"{kind}[{at}]{' with keyword arguments' * with_kwargs}", hook, None
        yield "__class__", type(module), None

    def _of_object(self, value: Any) -> Parts:
        """The class of an object, and the attributes for which the code asks; of UserDict and the like also the data."""
        kind, held = type(value), attributes(value) or {}
        computes = kind.__getattribute__ is not _PLAIN_ACCESS or hasattr(kind, "__getattr__")  # by other names
        inner = ("data", "maps") if isinstance(value, UserDict | UserList | ChainMap) else ()
        for name in list(held):
            if computes or name in self._names or name in inner:
                yield name, held[name], (held, name)
        for base in kind.__mro__:
            for name in _slots(base):
                yield name, getattr(value, name, None), (value, name)
        yield "__class__", kind, None

    def _of_class(self, kind: type) -> Parts:
        """The members of a class and its bases for which the code asks, or which Python calls by itself."""
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
    """The functions and arguments in a bound method, a partial, a property, a weak reference, or another wrapper."""
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

