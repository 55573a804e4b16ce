"""Detect changes of a model that make its captured graph stale: everything that a trace reads besides the tensors' values.

Contract: cheap enough for every step (about 2 ms for 400 modules). `module_structure` changes if a module is exchanged or a
parameter tied or untied, which a pipeline cannot follow. `capture_conditions` changes if another capture is needed: flags,
numbers and tensors in attributes or one level down in their lists, tuples and dicts, hooks, layouts of parameters, autocast,
and the state of the loss.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_WATCHED = frozenset([bool, int, float, str, type(None), torch.Tensor])
_CONTAINERS = frozenset([list, tuple, dict, OrderedDict, defaultdict, torch.Size])
_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_LARGE = 1000  # a container with more items (a vocabulary) is compared by identity and length only


@dataclass(frozen=True)
class WatchedModules:
    """The modules of a model and its loss, in order; the loss; the modules that belong to the loss alone."""

    modules: Sequence[nn.Module]
    loss: Any
    of_loss: Sequence[nn.Module]


def watch_modules(model: nn.Module, loss: Any) -> WatchedModules:
    """All modules of the model, and of the loss if it is a module."""
    own = list(model.modules())
    ids = set(map(id, own))
    of_loss = [module for module in loss.modules() if id(module) not in ids] if isinstance(loss, nn.Module) else []
    return WatchedModules([*own, *of_loss], loss, of_loss)


def module_structure(watched: WatchedModules) -> tuple[Any, ...]:
    """The submodules of each module by identity, and the names that share a tensor. A replaced parameter changes neither."""
    modules = watched.modules
    children = tuple(id(child) for module in modules for child in module._modules.values())
    first: dict[int, int] = {}
    tensors = (t for module in modules for store in (module._parameters, module._buffers) for t in store.values())
    ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors) if tensor is not None)
    return children, ties


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def capture_conditions(watched: WatchedModules, device_type: str) -> tuple[Any, ...]:
    """The state that the trace of a forward depends on and that a user may change between steps."""
    parameters = [p for module in watched.modules for p in module._parameters.values() if p is not None]
    buffers = [b for module in watched.modules for b in module._buffers.values() if b is not None]
    return (
        tuple(map(_of_module, watched.modules)),
        tuple(id(buffer) for module in watched.of_loss for buffer in module._buffers.values()),
        _of_callable(watched.loss),
        tuple((p.requires_grad, bool(p._backward_hooks)) for p in parameters),
        tuple(map(_layout, (*parameters, *buffers))),
        autocast_state(device_type),
    )


def without(conditions: tuple[Any, ...], places: Collection[tuple[int, str, Any]]) -> tuple[Any, ...]:
    """`capture_conditions` without some attributes, or items of the containers in attributes.

    A place is the index of a module in `WatchedModules`, the attribute's name, and the item's index or key, or None.
    """
    modules = list(conditions[0])
    for index, attribute, item in places:
        pairs, hooks = modules[index]
        found = [(name, value if name != attribute else _without_item(value, item)) for name, value in pairs]
        modules[index] = (tuple(pair for pair in found if item is not None or pair[0] != attribute), hooks)
    return (tuple(modules), *conditions[1:])


def _without_item(value: Any, item: int | str | None) -> Any:
    """The watched values of a container without those of one item; the value itself if there is no item."""
    return value if item is None else tuple(pair for pair in value if pair[0] != _of_value(item))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The dtype, shape and strides of a parameter or buffer: a graph fits these, and compiled code relies on the strides."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout is torch.strided else tensor.layout


def autocast_state(device_type: str) -> tuple[bool, str]:
    """True and the dtype if autocast is on around the call."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    """A module's hooks, and its attributes that are flags, numbers, names, or tensors outside of parameters and buffers."""
    hooks = [hook for kind in _HOOKS if getattr(module, kind) for hook in getattr(module, kind).values()]
    return _of_dict(vars(module)), tuple(map(id, hooks))


def _of_dict(attributes: dict[Any, Any]) -> tuple[Any, ...]:
    """The watched values by name, and those in containers."""
    found = []
    for name, value in attributes.items():
        kind = type(value)
        if kind in _WATCHED:
            found.append((name, _of_value(value)))
        elif kind in _CONTAINERS and name not in _REGISTRIES:
            found.append((name, _of_container(value)))
    return tuple(found)


def _of_value(value: Any) -> Any:
    """A tensor's identity; the type and value of a flag, number or name; None for all other values."""
    kind = type(value)
    if kind is torch.Tensor:
        return id(value)
    return (kind, value) if kind in _WATCHED else None


def _of_container(container: Any) -> Any:
    """The watched values of a list, tuple or dict, by index or key."""
    if len(container) > _LARGE:
        return id(container), len(container)
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return tuple((_of_value(key), _of_value(value)) for key, value in pairs if type(value) in _WATCHED)


def _of_callable(loss: Any) -> tuple[Any, ...]:
    """The state of a loss that is no module: the bound arguments of a `partial`, closure, defaults, attributes."""
    if isinstance(loss, nn.Module | type):
        return ()
    if isinstance(loss, partial):
        return _of_dict({**dict(enumerate(loss.args)), **loss.keywords}), _of_callable(loss.func)
    if isinstance(loss, MethodType):
        return _of_callable(loss.__func__)  # its object is rather a trainer with counters than a part of the loss
    if isinstance(loss, FunctionType):
        closure: dict[Any, Any] = dict(enumerate(map(in_cell, loss.__closure__ or ())))
        defaults: dict[Any, Any] = {**dict(enumerate(loss.__defaults__ or ())), **(loss.__kwdefaults__ or {})}
        return _of_dict(closure), _of_dict(defaults), _of_dict(vars(loss))
    return _of_dict(getattr(loss, "__dict__", {}))


def in_cell(cell: CellType) -> Any:
    """The present value of a closure's variable; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
