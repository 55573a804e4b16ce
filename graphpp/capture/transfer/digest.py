"""A digest to compare model and loss between processes, and common names for their tensors and process groups.

Contract
--------
- Equal `ModelDigest.digest`s mean that a trace reads the same in both processes: all objects of `Watch.items` without limits,
  dicts and sets in any order, and the settings of torch.
- The digest omits what a trace does not read or what differs among ranks: values of registered parameters and buffers, device
  indices, addresses, code and state of installed libraries.
- `ModelDigest.in_order` also counts the order of dicts, on which a saved graph depends.
- `UnreadableError` is raised for an object that cannot be compared.
- `per_process` names the first user function that asks for the rank, the process or the environment. Such ranks may capture
  different graphs although their digests are equal.
- `tensors` and `groups`: the unregistered tensors and the process groups, by names that agree if the digests do.
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
from graphpp.capture.objects.walk import PLAIN, Item, Limits
from graphpp.capture.watch.conditions import Watch
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.released import class_of

_EVERYTHING = Limits(depth=50, items=10**7, array=2**40, objects=10**6)
_OF_THE_PROCESS = frozenset(  # names in code that reads the process, its rank, randomness or its environment
    ("get_rank", "get_local_rank", "get_node_local_rank", "get_group_rank", "get_coordinate", "current_device",
     "getpid", "gethostname", "urandom", "uuid4", "new_group", "init_device_mesh", "init_process_group", "environ", "getenv")
)  # fmt: skip


class UnreadableError(Exception):
    """An object that cannot be compared between processes."""


class ModelDigest:
    """The digest of a model, its loss and further `facts`. Raises `UnreadableError`."""

    def __init__(self, model: nn.Module, loss: Any, *facts: object) -> None:
        watch = Watch(model, loss)
        self.per_process: str | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, str] = {}
        lines, orders = [repr(_settings()), *map(repr, facts), *_ties(model)], []
        for item in watch.items(_EVERYTHING):
            name = watch.name_of(item.path)
            if item.first is not None:
                lines.append(f"{name}\tas\t{watch.name_of(item.first)}")
            else:
                lines += [f"{name}\t{item.kind}\t{text}" for text in self._texts(name, item)]
                if item.kind == "mapping":
                    orders.append(f"{name}\t{[key for key in item.value if type(key) in PLAIN]}")
        self.digest = hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogatepass")).digest()
        self.in_order = hashlib.sha256(self.digest + "\n".join(orders).encode(errors="surrogatepass")).digest()

    def name_of_tensor(self, tensor: torch.Tensor) -> str | None:
        """The name of the model's or loss's tensor that is `tensor` or aliases it; None if there is none."""
        return self._name_of_tensor.get(_memory_of(tensor)) if tensor.numel() else None

    @functools.cached_property
    def _name_of_tensor(self) -> Mapping[Any, str]:
        return {_memory_of(tensor): name for name, tensor in reversed(self.tensors.items())}

    @functools.cached_property
    def name_of_group(self) -> Mapping[str, str]:
        """The name of a process group in model or loss, by the group's name in this process."""
        return {group: name for name, group in reversed(self.groups.items())}

    def _texts(self, name: str, item: Item) -> Iterator[str]:
        """The lines that compare an object, without its parts that are items themselves."""
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
        """The lines of a process group or a mesh."""
        if isinstance(value, dist.ProcessGroup):
            self.groups[name] = str(value.group_name)
            yield str(value.size())
            return
        yield f"{value.mesh_dim_names} {tuple(value.mesh.shape)}"
        for at, dim in enumerate(value.mesh_dim_names or ()):
            self.groups[f"{name}.{dim}"] = str(value.get_group(at).group_name)


def _ties(model: nn.Module) -> Iterator[str]:
    """The name of each module and parameter, with the first name of the same object."""
    first: dict[int, str] = {}
    for named in (model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)):
        yield from (f"{name} is {first.setdefault(id(each), name)}" for name, each in named)


def _settings() -> tuple[Any, ...]:
    """The process-wide settings of torch that a trace reads: defaults, kernel flags, hooks on all modules."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    stores = [store for key, store in sorted(vars(nn_module).items()) if key.startswith("_global_") and store]
    hooks = [_qualified(hook) for store in stores for hook in store.values()]
    return torch.get_default_dtype(), torch.get_default_device(), kernels, flags, autocast, hooks


def _of_values(name: str, tensor: torch.Tensor) -> Iterator[str]:
    """A constant of the graph, with its values."""
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
    """The instructions, names and constants of code and nested functions, without file names and lines."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable.hex()
    yield code.co_name, code.co_code.hex(), code.co_varnames, code.co_freevars, code.co_names, code.co_flags, *counts
    for at, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            yield from ((at, *facts) for facts in _code(constant))
        else:
            yield at, sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _qualified(value: Any) -> str:
    owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
    return f"{owner}.{getattr(value, '__qualname__', value)}"


def _of_type(value: Any) -> str:
    return _qualified(type(value))


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{_of_type(value)} {value.name} {sorted(vars(value).items())}"
    return f"{_of_type(value)} {value!r}"


def _of_set(values: Any) -> str:
    """The items of a set: plain data, classes, tuples and sets of these. Raises `UnreadableError` for others."""
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
    """A key equal for a tensor and its detached alias."""
    address = tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else id(tensor)
    return address, tensor.dtype, tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
