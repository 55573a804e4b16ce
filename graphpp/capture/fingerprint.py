"""What a captured graph took from the model besides its tensors' values: if that changes, it stands for another model.

Contract: cheap enough for every step (about 2 ms for 400 modules). `module_structure` is what a pipeline cannot follow (modules
exchanged, parameters tied or untied); `capture_conditions` is what asks for another capture (flags, numbers and tensors held as
attributes or one level down in their lists, tuples and dicts, hooks, autocast, and what a loss holds).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_WATCHED = frozenset([bool, int, float, str, type(None), torch.Tensor])
_CONTAINERS = frozenset([list, tuple, dict, OrderedDict, defaultdict, torch.Size])
_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_LARGE = 1000  # of a container with more (a vocabulary), only which one it is and its length


@dataclass(frozen=True)
class WatchedModules:
    """The modules of a model and its loss, in order; the loss; those modules that only the loss has."""

    modules: Sequence[nn.Module]
    loss: Any
    of_loss: Sequence[nn.Module]


def watch_modules(model: nn.Module, loss: Any) -> WatchedModules:
    """All modules under the model and the loss, if that is one."""
    own = list(model.modules())
    ids = set(map(id, own))
    of_loss = [module for module in loss.modules() if id(module) not in ids] if isinstance(loss, nn.Module) else []
    return WatchedModules([*own, *of_loss], loss, of_loss)


def module_structure(watched: WatchedModules) -> tuple[Any, ...]:
    """Which module holds which, and which names mean one tensor (not which tensor: a parameter may be replaced)."""
    modules = watched.modules
    held = tuple(id(child) for module in modules for child in module._modules.values())
    first: dict[int, int] = {}
    tensors = (t for module in modules for store in (module._parameters, module._buffers) for t in store.values())
    ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors) if tensor is not None)
    return held, ties


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def capture_conditions(watched: WatchedModules, device_type: str) -> tuple[Any, ...]:
    """Everything else that the trace of a forward depends on, and that a user may change between steps."""
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


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a graph takes for granted of a parameter or buffer; what was compiled counts on its strides."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout is torch.strided else tensor.layout


def autocast_state(device_type: str) -> tuple[bool, str]:
    """Whether autocast is on around the call, and to which dtype."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    """Hooks, and attributes that are flags, numbers, names, or tensors that are neither parameter nor buffer."""
    hooks = [hook for kind in _HOOKS if getattr(module, kind) for hook in getattr(module, kind).values()]
    return _of_dict(vars(module)), tuple(map(id, hooks))


def _of_dict(held: dict[Any, Any]) -> tuple[Any, ...]:
    """The values that are watched, themselves or in a container, by name."""
    found = []
    for name, value in held.items():
        kind = type(value)
        if kind in _WATCHED:
            found.append((name, _of_value(value)))
        elif kind in _CONTAINERS and name not in _REGISTRIES:
            found.append((name, _of_container(value)))
    return tuple(found)


def _of_value(value: Any) -> Any:
    """A tensor by identity, a flag, number or name by its type and value; nothing else is watched."""
    kind = type(value)
    if kind is torch.Tensor:
        return id(value)
    return (kind, value) if kind in _WATCHED else None


def _of_container(held: Any) -> Any:
    """What is watched among the values of a list, tuple or dict, and their places."""
    if len(held) > _LARGE:
        return id(held), len(held)
    pairs = held.items() if isinstance(held, dict) else enumerate(held)
    return tuple((_of_value(key), _of_value(value)) for key, value in pairs if type(value) in _WATCHED)


def _of_callable(loss: Any) -> tuple[Any, ...]:
    """What a loss that is no module computes with besides its arguments: bound values, closure, defaults, attributes."""
    if isinstance(loss, nn.Module | type):
        return ()
    if isinstance(loss, partial):
        return _of_dict({**dict(enumerate(loss.args)), **loss.keywords}), _of_callable(loss.func)
    if isinstance(loss, MethodType):
        return _of_callable(loss.__func__)  # its object is more likely a trainer, with counters, than a part of the loss
    if isinstance(loss, FunctionType):
        closure: dict[Any, Any] = dict(enumerate(map(_in_cell, loss.__closure__ or ())))
        defaults: dict[Any, Any] = {**dict(enumerate(loss.__defaults__ or ())), **(loss.__kwdefaults__ or {})}
        return _of_dict(closure), _of_dict(defaults), _of_dict(vars(loss))
    return _of_dict(getattr(loss, "__dict__", {}))


def _in_cell(cell: CellType) -> Any:
    """What a variable of a closure is now, if it has been assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
