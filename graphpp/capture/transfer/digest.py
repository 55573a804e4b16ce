"""The digest by which two processes tell whether they have the same model and loss, and names for their tensors and groups.

Contract
--------
- Two processes with equal `ModelDigest.digest`s have models and losses of which a trace reads the same: the objects of
  `Watch.items` without its limits, in any order of dicts and sets, and the settings of torch.
- Values of registered parameters and buffers do not count, for a trace does not read them. Neither do indices of devices,
  addresses, and code and state of installed libraries.
- `ModelDigest.in_order` also counts the order of dicts, which a saved graph depends on.
- `UnreadableError` is raised for an object that cannot be looked into: then two processes cannot be compared.
- `per_process` names the first function of the user whose code asks which process runs it, or for the environment. Ranks with
  such code may have other graphs although their digests are equal.
- `tensors` and `groups` have the tensors that no module of the model has registered, and the process groups, under names that
  are equal in two processes with equal digests.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as nn_module

from graphpp.capture.objects.names import names_in
from graphpp.capture.objects.walk import PLAIN, Item, Limits, Path
from graphpp.capture.watch.conditions import Watch
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.released import class_of

_EVERYTHING = Limits(depth=50, items=10**7, array=2**40, objects=10**6)
_OF_THE_PROCESS = frozenset(  # names in code that asks for the process, its place among others, its time or its environment
    ("get_rank", "get_local_rank", "get_node_local_rank", "get_group_rank", "get_coordinate", "current_device",
     "getpid", "gethostname", "urandom", "uuid4", "new_group", "init_device_mesh", "init_process_group", "environ", "getenv")
)  # fmt: skip


class UnreadableError(Exception):
    """An object of which the digest cannot tell whether another process has the same."""


class ModelDigest:
    """The digest of a model, its loss and further facts. Raises `UnreadableError`."""

    def __init__(self, model: nn.Module, loss: Any, *facts: object) -> None:
        watch = Watch(model, loss)
        self._fqns = list(dict(model.named_modules()))
        self.per_process: str | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, str] = {}
        lines, orders = [repr(_settings()), *map(repr, facts), *_ties(model)], []
        for item in watch.items(_EVERYTHING):
            name = self._name(item.path)
            if item.first is not None:
                lines.append(f"{name}\tas\t{self._name(item.first)}")
            else:
                lines += [f"{name}\t{item.kind}\t{text}" for text in self._texts(name, item)]
                if item.kind == "mapping":
                    orders.append(f"{name}\t{[key for key in item.value if type(key) in PLAIN]}")
        self.digest = hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogatepass")).digest()
        self.in_order = hashlib.sha256(self.digest + "\n".join(orders).encode(errors="surrogatepass")).digest()

    def name_of_tensor(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor of the model or the loss that `tensor` is, or is an alias of; None if there is none."""
        return self._name_of_tensor.get(_memory_of(tensor)) if tensor.numel() else None

    @functools.cached_property
    def _name_of_tensor(self) -> Mapping[Any, str]:
        return {_memory_of(tensor): name for name, tensor in reversed(self.tensors.items())}

    @functools.cached_property
    def name_of_group(self) -> Mapping[str, str]:
        """The name under which the model or the loss holds a process group, by the group's name in this process."""
        return {group: name for name, group in reversed(self.groups.items())}

    def _name(self, path: Path) -> str:
        """A path as text: of a module of the model the FQN, and the keys and attributes."""
        root, *rest = path
        if isinstance(root, int):
            root = f"model.{self._fqns[root]}" if root < len(self._fqns) else f"loss.{root - len(self._fqns)}"
        return ".".join([root.rstrip("."), *(each if isinstance(each, str) else f"[{each!r}]" for each in rest)])

    def _texts(self, name: str, item: Item) -> Iterator[str]:
        """The lines by which an object is compared, without the parts that are items of their own."""
        kind, value = item.kind, item.value
        if kind in ("tensor", "constant"):
            self.tensors[name] = value
            yield from _of_values(name, value)
        elif kind == "ranks":
            yield from self._of_ranks(name, value)
        elif kind == "function":
            if self.per_process is None and not _OF_THE_PROCESS.isdisjoint(names_in(value.__code__)):
                self.per_process = f"{value.__module__}.{value.__qualname__}"
            yield from map(repr, _code(value.__code__))
        elif kind in _TEXTS:
            yield _TEXTS[kind](value)
        else:
            raise UnreadableError(f"{name}, a {type(value).__module__}.{type(value).__qualname__}")

    def _of_ranks(self, name: str, value: Any) -> Iterator[str]:
        """A process group, or a mesh with its groups by the names of its dimensions."""
        if isinstance(value, dist.ProcessGroup):
            self.groups[name] = str(value.group_name)
            yield str(value.size())
            return
        yield f"{value.mesh_dim_names} {tuple(value.mesh.shape)}"
        for at, dim in enumerate(value.mesh_dim_names or ()):
            self.groups[f"{name}.{dim}"] = str(value.get_group(at).group_name)


def _ties(model: nn.Module) -> Iterator[str]:
    """The names of all modules and parameters, each with the first name of the same object."""
    first: dict[int, str] = {}
    for named in (model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)):
        yield from (f"{name} is {first.setdefault(id(each), name)}" for name, each in named)


def _settings() -> tuple[Any, ...]:
    """The settings of torch in this process that a trace reads: defaults, flags of kernels, hooks on all modules."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    stores = [store for key, store in sorted(vars(nn_module).items()) if key.startswith("_global_") and store]
    hooks = [_qualified(hook) for store in stores for hook in store.values()]
    return torch.get_default_dtype(), torch.get_default_device(), kernels, flags, autocast, hooks


def _of_values(name: str, tensor: torch.Tensor) -> Iterator[str]:
    """A tensor that a graph has as a constant, with its values."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnreadableError(f"{name}, a {type(tensor).__qualname__} of layout {tensor.layout}")
    yield _of_layout(tensor)
    if not tensor.is_meta:
        numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield hashlib.sha256(numbers.numpy().tobytes()).hexdigest()


def _of_layout(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    facts = [class_of(tensor).__qualname__, tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad]
    part = spread_tensor(tensor)
    if part is not None:
        mesh, placements = part.spread.mesh, part.spread.placements
        facts += [placements, tuple(part.local.shape), tuple(mesh.mesh.shape), mesh.get_coordinate()]
    return str(facts)


def _code(code: types.CodeType) -> Iterator[tuple[object, ...]]:
    """The instructions, names and constants of code and of the functions in it, without the names of its file and lines."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable.hex()
    yield code.co_name, code.co_code.hex(), code.co_varnames, code.co_freevars, code.co_names, code.co_flags, *counts
    for at, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            yield from ((at, *facts) for facts in _code(constant))
        else:
            yield at, sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _qualified(value: Any) -> str:
    """The full name of a class, or of code that is compiled or a library's."""
    owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
    return f"{owner}.{getattr(value, '__qualname__', value)}"


def _of_type(value: Any) -> str:
    return _qualified(type(value))


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{_of_type(value)} {value.name} {sorted(vars(value).items())}"
    return f"{_of_type(value)} {value!r}"


def _of_set(values: Any) -> str:
    """The items of a set: plain data, tuples and sets of such, and classes. Raises `UnreadableError` for others."""
    return str(sorted(map(_of_set_item, values)))


def _of_set_item(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(map(_of_set_item, value)))
    if isinstance(value, frozenset):
        return _of_set(value)
    if isinstance(value, type):
        return _qualified(value)
    if type(value) not in PLAIN:
        raise UnreadableError(f"a set with a {_of_type(value)}")
    return repr(value)


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "plain": _plain,
    "text": lambda value: value.type if isinstance(value, torch.device) else repr(value),  # ranks have other indices
    "ignored": _of_type,
    "parameter": _of_layout,
    "buffer": _of_layout,
    "array": lambda array: f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}",
    "mapping": lambda mapping: f"{_of_type(mapping)} {len(mapping)}",
    "sequence": lambda values: f"{_of_type(values)} {len(values)}",
    "set": _of_set,
    "wrapper": _of_type,
    "name": _qualified,
    "variable": lambda variable: variable.name,
    "class": _qualified,
    "object": _of_type,
    "module": _of_type,
}


def _memory_of(tensor: torch.Tensor) -> Any:
    """Equal for a tensor and its detached alias: address, dtype, shape and strides."""
    address = tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else id(tensor)
    return address, tensor.dtype, tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
