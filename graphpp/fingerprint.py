"""What a captured graph took from the model besides its tensors' values: if that changes, it stands for another model.

Contract: cheap enough for every step (about 2 ms for 400 modules). `structure` is what a pipeline cannot follow (modules
exchanged, parameters tied or untied); `circumstances` is what asks for another capture (flags, numbers and tensors held as
attributes, hooks, autocast).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_WATCHED = frozenset([bool, int, float, str, type(None), torch.Tensor])


def modules_of(*roots: Any) -> list[nn.Module]:
    """All modules under those roots that are modules, in order."""
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def structure(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Which module holds which, and which names mean one tensor (not which tensor: a parameter may be replaced)."""
    held = tuple(id(child) for module in modules for child in module._modules.values())
    first: dict[int, int] = {}
    tensors = (t for module in modules for store in (module._parameters, module._buffers) for t in store.values())
    ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors) if tensor is not None)
    return held, ties


def circumstances(modules: Sequence[nn.Module], device_type: str) -> tuple[Any, ...]:
    """Everything else that the trace of a forward depends on, and that a user may change between steps."""
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    return (
        tuple(map(_of_module, modules)),
        tuple((p.requires_grad, p.dtype, p.shape) for p in parameters),
        autocast(device_type),
    )


def autocast(device_type: str) -> tuple[bool, str]:
    """Whether autocast is on around the call, and to which dtype."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    """Hooks, and attributes that are flags, numbers, names, or tensors that are neither parameter nor buffer."""
    watched = [(name, value) for name, value in vars(module).items() if type(value) in _WATCHED]
    attributes = tuple((name, id(value) if type(value) is torch.Tensor else (type(value), value)) for name, value in watched)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return attributes, tuple(map(id, hooks))
