"""Let modules read their parameters as `DTensor`s while the parameters themselves are this rank's local shards.

Contract: while `read_as_dtensors` is open, reading an attribute of a module that held a `DTensor` gives a `DTensor` made of the
tensor that is in the module's `_parameters` or `_buffers` now, with the mesh, placements, shape and strides of the original.
Gradients pass to that tensor, and are whole where the original is replicated. Afterwards modules are as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphpp._torch.parallel.sharded_tensor import Spread, as_dtensor
from graphpp.runtime.shards.layer_parts import layer_part


def has_dtensors(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model is spread over ranks by the model itself."""
    return any(layer_part(tensor) is not None for tensor in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def read_as_dtensors(model: nn.Module) -> Iterator[None]:
    """While open, modules read their spread tensors as `DTensor`s. The tensors may be replaced by local shards inside."""
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module in model.modules():
            spreads = {**_spreads(module._parameters), **_spreads(module._buffers)}
            if spreads:
                changed.append((module, type(module)))
                module.__class__ = _reading(type(module), spreads)
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _spreads(store: Mapping[str, torch.Tensor | None]) -> dict[str, Spread]:
    found = {name: layer_part(tensor) for name, tensor in store.items() if tensor is not None}
    return {name: part.spread for name, part in found.items() if part is not None}


def _reading(kind: type[nn.Module], spreads: Mapping[str, Spread]) -> type[nn.Module]:
    """A class like `kind` whose instances read these attributes as `DTensor`s."""
    properties = {name: _property(name, spread) for name, spread in spreads.items()}
    facts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # `type.__new__` alone: a metaclass or `__init_subclass__` of the model's may register classes
    return type.__new__(type(kind), kind.__name__, (kind,), {**facts, **properties})


def _property(name: str, spread: Spread) -> Any:
    def read(module: nn.Module) -> Any:
        local = module._parameters.get(name)
        found = module._buffers.get(name) if local is None else local
        return None if found is None else as_dtensor(found, spread)

    def write(module: nn.Module, value: Any) -> None:
        nn.Module.__setattr__(module, name, value)

    return property(read, write)
