"""Find the modules of a model that a trace would treat alike, such as the layers of a transformer.

Contract: the members of one `RepeatedModules` have the same class, submodules of the same names and classes, parameters and
buffers of the same shapes, strides, dtypes and needs-grad. Not found: modules that share a submodule or a tensor with another
part of the model, and modules without submodules. Members may still compute differently, for other reasons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FEWEST = 6  # members: two are traced, and fewer than four copies are not worth the additional work


@dataclass(frozen=True, eq=False)
class RepeatedModules:
    """Modules of one outline by FQN, in the model's order."""

    members: Mapping[str, nn.Module]


def repeated_modules(model: nn.Module) -> list[RepeatedModules]:
    """The groups of at least `FEWEST` members; no member contains another one."""
    modules = dict(model.named_modules())
    shared = _with_shared_parts(model)
    alike: dict[Any, dict[str, nn.Module]] = defaultdict(dict)
    for fqn, module in modules.items():
        if fqn and fqn not in shared and any(True for _ in module.children()):
            alike[_outline(module)][fqn] = module
    groups: list[RepeatedModules] = []
    found: set[str] = set()
    candidates = {fqn: members for members in alike.values() if len(members) >= FEWEST for fqn in members}
    for fqn in sorted(modules, key=lambda name: name.count(".")):  # a module comes before its submodules
        members = candidates.get(fqn, {})
        if fqn in members and not _is_inside(fqn, found):
            outer = {name: module for name, module in members.items() if not _is_inside(name, found)}
            if len(outer) >= FEWEST:
                groups.append(RepeatedModules(outer))
            for name in members:
                candidates.pop(name, None)
            found.update(name for group in groups for name in group.members)
    return groups


def _is_inside(fqn: str, found: set[str]) -> bool:
    parts = fqn.split(".")
    return any(".".join(parts[:end]) in found for end in range(1, len(parts) + 1))


def _with_shared_parts(model: nn.Module) -> set[str]:
    """The FQNs of the modules that contain a module or a tensor which the model has under more than one FQN."""
    places: dict[int, list[str]] = defaultdict(list)
    for fqn, module in model.named_modules(remove_duplicate=False):
        places[id(module)].append(fqn)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for fqn, tensor in tensors:
        places[id(tensor)].append(fqn)
    names = [name for each in places.values() if len(each) > 1 for name in each]
    parts = [name.split(".") for name in names]
    return {".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)}


def _outline(module: nn.Module) -> Any:
    """Equal for modules with the same classes and tensors under the same names."""
    return tuple(
        (name, id(type(each)), *(_tensors(getattr(each, store)) for store in ("_parameters", "_buffers")))
        for name, each in module.named_modules()
    )


def _tensors(store: Mapping[str, torch.Tensor | None]) -> Any:
    return tuple((name, None if each is None else _layout(each)) for name, each in store.items())


def _layout(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
