"""Walk over the objects that a trace of model and loss can reach: their code, numbers, constants and process groups.

`reachable_code.py` reads classes and functions, this file all other objects.

Contract
--------
- Two processes with equal `Reachable.digest`s have models and losses from which a trace makes the same graph. The digest counts
  classes, functions with their closures, defaults and the globals that their code names, flags, numbers, texts, arrays, shapes
  and dtypes of tensors, values of tensors that are no registered parameter or buffer.
- Not counted: values of registered parameters and buffers, which a trace does not read; indices of devices; addresses; orders
  of sets and of plain dicts; of libraries the text of code (a library counts by its version), and whole numbers from 2^40 on
  in attributes of their objects, which are hashes or addresses.
- `UnreadableError` is raised for an object that the walk cannot look into, and for code that asks which process runs it. Two
  processes then cannot be compared.
- `Reachable.exact` is a digest that counts the orders of dicts and the levels of loggers too.
- With `by_value` no digest counts which lists, tuples and dicts are the same: `torch.export` replaces those of modules by
  equal ones.
- `tensors` and `groups` have the tensors that are no registered parameter or buffer, and the process groups, under names that
  are equal in two processes with equal digests.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphpp._torch import aot
from graphpp._torch.parallel.sharded_tensor import is_placement
from graphpp.capture.transfer import objects
from graphpp.capture.transfer.libraries import is_installed, top_package
from graphpp.capture.transfer.names_asked import UnreadableError
from graphpp.capture.transfer.objects import COMPILED, SCALARS, WITHOUT_EFFECT, attributes_of
from graphpp.capture.transfer.reachable_code import Children, ReachableCode, named
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.released import class_of

_LONGEST_NAME = 2000  # characters; a longer one is that of an object within itself
_STORES = ("_parameters", "_buffers", "_modules")  # walked by their tensors and modules, under the model's own names


class Reachable:
    """The objects under `roots`, each visited once, under names such as `model.layers.0.scale`. Raises `UnreadableError`."""

    def __init__(self, *, by_value: bool = False, **roots: Any) -> None:
        self._unshared = (list, tuple, dict) if by_value else ()
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, str] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # objects made during the walk, whose ids must not be used twice
        self._hash = hashlib.sha256()
        self._orders = hashlib.sha256()  # of dicts
        self._code = ReachableCode(self._note)
        for name, root in roots.items():
            self._visit(name, root)
        self.digest = self._hash.digest()
        self.exact = hashlib.sha256(self.digest + self._orders.digest()).digest()

    def has_read(self, code: types.CodeType) -> bool:
        """Whether the digest counts this code of the user."""
        return code in self._code.codes

    def has_walked(self, kind: type) -> bool:
        """Whether the digest counts the attributes of this class."""
        return id(kind) in self._seen and kind not in self._code.library_classes

    @property
    def library_classes(self) -> Set[type]:
        """The classes of libraries that model and loss reach."""
        return self._code.library_classes

    def name_of_tensor(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor of the model or the loss that `tensor` is, or is an alias of; None if there is none."""
        return self._name_of_tensor.get(objects.place_of(tensor)) if tensor.numel() else None

    @functools.cached_property
    def _name_of_tensor(self) -> Mapping[Any, str]:
        return {objects.place_of(tensor): name for name, tensor in reversed(self.tensors.items())}

    @functools.cached_property
    def name_of_group(self) -> Mapping[str, str]:
        """The name under which the model or the loss holds a process group, by the group's name in this process."""
        return {group: name for name, group in reversed(self.groups.items())}

    def _visit(self, name: str, value: Any) -> None:
        """Visit an object and all that it reaches, depth first."""
        pending = [(name, value)]
        while pending:
            name, value = pending.pop()
            pending += reversed(list(self._children(name, value)))

    def _note(self, *facts: object) -> None:
        self._hash.update("\t".join(map(str, facts)).encode(errors="surrogatepass") + b"\n")

    def _children(self, name: str, value: Any) -> Children:
        """Note an object; yields the named objects that it reaches."""
        if type(value) in SCALARS:
            self._note(name, type(value).__name__, repr(value))
        elif type(value) is torch.device:
            self._note(name, "device", value.type)  # ranks have other indices
        elif type(value) in self._unshared:
            if len(name) > _LONGEST_NAME:
                raise UnreadableError(f"{name[:80]}.., a container in itself")
            yield from self._of_new(name, value)
        elif id(value) in self._seen:
            self._note(name, "seen", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            yield from self._of_new(name, value)

    def _of_new(self, name: str, value: Any) -> Children:
        for kinds, children in self._kinds:
            if isinstance(value, kinds):
                yield from children(self, name, value)
                return
        if is_placement(value):
            self._note(name, "placement", repr(value))
            return
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype != object:
            self._note(name, type(value).__name__, value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
            return
        attributes = attributes_of(value)
        if (attributes is None or objects.is_hiding(type(value))) and type(value) is not object:
            raise UnreadableError(f"{name}, a {type(value).__module__}.{type(value).__qualname__}")
        self._note(name, type(value).__module__, type(value).__qualname__)
        yield f"{name}.__class__", type(value)
        yield from named(name, attributes or {})

    # ------------------------------------------------------------------------------------------------ kinds of objects

    def _of_number(self, name: str, value: Any) -> Children:
        """A number or text of a class of its own: the plain value beneath, and the attributes."""
        base = next(kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind))
        self._note(name, type(value).__qualname__, base.__repr__(value))
        yield f"{name}.__class__", type(value)
        yield from named(name, attributes_of(value) or {})

    def _of_enum(self, name: str, value: Enum) -> Children:
        self._note(name, type(value).__module__, type(value).__qualname__, value.name)
        yield f"{name}.__class__", type(value)
        yield from named(name, vars(value))

    def _of_pattern(self, name: str, value: re.Pattern[Any]) -> Children:
        self._note(name, "pattern", repr(value.pattern), value.flags)
        return iter(())

    def _of_wrapper(self, name: str, value: Any) -> Children:
        """The functions and arguments in a bound method, a partial, a property, or another wrapper of functions."""
        self._note(name, type(value).__qualname__)
        caches = isinstance(value, functools._lru_cache_wrapper) and not is_installed(top_package(value))
        if caches and value.cache_info().currsize:
            raise UnreadableError(f"{name}, a function with cached results")
        parts = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "__wrapped__")
        yield from ((f"{name}.{part}", getattr(value, part)) for part in parts if hasattr(value, part))

    def _of_compiled(self, name: str, value: Any) -> Children:
        """A function that is no Python code, by its full name, and the object that the function is bound to."""
        root = getattr(value, "__module__", None) or top_package(getattr(value, "__objclass__", None))
        if isinstance(value, types.BuiltinFunctionType) and root and not is_installed(root.partition(".")[0]):
            raise UnreadableError(f"{name}, compiled code of {root}")
        qualified = getattr(value, "__qualname__", type(value).__qualname__)
        self._note(name, getattr(value, "__module__", None), getattr(value, "__objclass__", None), qualified)
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, types.ModuleType):
            yield f"{name}.__self__", bound

    def _of_operator(self, name: str, value: Any) -> Children:
        self._note(name, "operator", value)
        return iter(())

    def _of_sequence(self, name: str, value: Any) -> Children:
        base = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        self._note(name, type(value).__qualname__, len(value))
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(base.__iter__(value)))
        yield from self._of_subclass(name, value, base)

    def _of_set(self, name: str, value: Any) -> Children:
        self._note(name, type(value).__qualname__, *sorted(objects.text_in_set(name, each) for each in value))
        return iter(())

    def _of_dict(self, name: str, value: Any) -> Children:
        """The items of a dict in the order of their keys' texts; keys that are no plain data stand in the dict's own order."""
        self._note(name, type(value).__qualname__, len(value))
        pairs = enumerate(dict.items(value))
        items = [(repr(key) if type(key) in SCALARS else f"key {at}", key, each) for at, (key, each) in pairs]
        self._orders.update(repr([text for text, _, _ in items]).encode(errors="surrogatepass"))
        for text, key, each in sorted(items, key=lambda item: item[0]):
            if type(key) not in SCALARS:
                yield f"{name}.{text}", key
            yield f"{name}[{text}]", each
        if isinstance(value, defaultdict):
            yield f"{name}.default_factory", value.default_factory
        yield from self._of_subclass(name, value, dict)

    def _of_subclass(self, name: str, value: Any, base: type) -> Children:
        """The class and attributes of an object of a class that extends a container."""
        if type(value) is not base:
            yield f"{name}.__class__", type(value)
            yield from named(name, attributes_of(value) or {})

    def _of_tensor(self, name: str, value: torch.Tensor) -> Children:
        """A tensor that no module has registered, with its values."""
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            raise UnreadableError(f"{name}, a {type(value).__qualname__} of layout {value.layout}")
        self._note_tensor(name, value)
        if not value.is_meta:
            numbers = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._note(name, hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
        self.tensors[name] = value
        yield from named(name, vars(value))

    def _note_tensor(self, name: str, tensor: torch.Tensor) -> None:
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        self._note(name, class_of(tensor).__qualname__, tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad)
        part = spread_tensor(tensor)
        if part is not None:
            mesh, placements = part.spread.mesh, part.spread.placements
            self._note(name, "spread", placements, tuple(part.local.shape), tuple(mesh.mesh.shape), mesh.get_coordinate())

    def _of_group(self, name: str, value: dist.ProcessGroup) -> Children:
        self._note(name, "process group", value.size())
        self.groups[name] = str(value.group_name)
        return iter(())

    def _of_mesh(self, name: str, value: DeviceMesh) -> Children:
        """The groups of a mesh, by the names of its dimensions."""
        self._note(name, "mesh", value.mesh_dim_names, tuple(value.mesh.shape))
        for at, dim in enumerate(value.mesh_dim_names or ()):
            yield f"{name}[{dim}]", value.get_group(at)

    def _of_module(self, name: str, module: nn.Module) -> Children:
        """The tensors, submodules and other attributes of a module, and its class; of hooks their functions, in order."""
        self._note(name, type(module).__qualname__)
        yield f"{name}.__class__", type(module)
        for store in ("_parameters", "_buffers"):
            for key, tensor in vars(module)[store].items():
                if tensor is not None:
                    self._note(f"{name}.{key}", store, self._seen.setdefault(id(tensor), len(self._seen)))
                    self._note_tensor(f"{name}.{key}", tensor)
                    yield from named(f"{name}.{key}", vars(tensor))
        yield from ((f"{name}.{key}", child) for key, child in vars(module)["_modules"].items())
        for key, value in named("", attributes_of(module) or {}):
            attribute = key.removeprefix(".")
            if attribute in _STORES or (attribute.startswith("_") and "hooks_" in attribute):
                continue  # "_forward_hooks_with_kwargs" and the like are noted with their hooks
            if attribute.endswith("_hooks") and isinstance(value, dict):
                yield from self._of_hooks(f"{name}{key}", module, attribute)
            else:
                yield f"{name}{key}", value

    def _of_hooks(self, name: str, module: nn.Module, attribute: str) -> Children:
        """The hooks of one kind in order; their keys count the hooks of the whole process, so keys do not count."""
        marks = [store for key, store in vars(module).items() if key.startswith(f"{attribute}_") and isinstance(store, dict)]
        for at, (key, hook) in enumerate(vars(module)[attribute].items()):
            self._note(f"{name}[{at}]", *(key in store for store in marks))
            yield f"{name}[{at}]", hook

    def _of_context_variable(self, name: str, value: ContextVar[Any]) -> Children:
        """The present value of a context variable, or its default; nothing if the variable has neither."""
        with contextlib.suppress(LookupError):
            yield f"{name}.get()", value.get()

    def _of_object_without_effect(self, name: str, value: Any) -> Children:
        self._note(name, type(value).__qualname__)
        if isinstance(value, logging.Logger):
            self._orders.update(repr(objects.state_of_logger(value)).encode())  # the levels of ranks differ
        return iter(())

    _kinds: Sequence[tuple[Any, Callable[[Reachable, str, Any], Children]]] = (
        (WITHOUT_EFFECT, _of_object_without_effect),
        (ContextVar, _of_context_variable),
        (threading.local, lambda self, name, value: named(name, vars(value))),
        (weakref.ref, lambda self, name, value: iter([(f"{name}()", value())])),
        (torch.Tensor, _of_tensor),
        (nn.Module, _of_module),
        (types.FunctionType, lambda self, name, value: self._code.of_function(name, value)),
        ((types.MethodType, functools.partial, staticmethod, classmethod, property, functools._lru_cache_wrapper), _of_wrapper),
        (COMPILED, _of_compiled),
        ((aot.Operator, aot.OperatorPacket), _of_operator),
        (type, lambda self, name, value: self._code.of_class(name, value)),
        (types.ModuleType, lambda self, name, value: self._code.of_python_module(name, value)),
        (Enum, _of_enum),
        ((int, float, complex, str, bytes), _of_number),
        (re.Pattern, _of_pattern),
        (slice, lambda self, name, value: named(name, {key: getattr(value, key) for key in ("start", "stop", "step")})),
        (types.MappingProxyType, lambda self, name, value: iter([(name, dict(value))])),
        (dict, _of_dict),
        ((list, tuple, deque), _of_sequence),
        ((set, frozenset), _of_set),
        (dist.ProcessGroup, _of_group),
        (DeviceMesh, _of_mesh),
    )
