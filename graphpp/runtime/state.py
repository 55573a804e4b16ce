"""The model's tensors under their FQNs: what a rank's stages read, update and hand to the optimizer.

Contract
--------
- One name per tensor (the first in the model's order); the objects are the model's own, moved to the device in place.
- `tensor(fqn)` reads the module anew at each call, so a parameter object that the user exchanged is seen.
- A tensor still on the meta device cannot run: `GraphPPError` says how to give it memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from graphpp.errors import GraphPPError


class ModelState:
    """Parameters and buffers of `model` by FQN."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        self.buffers = [name for name, _ in model.named_buffers()]
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in self.parameters + self.buffers:
            prefix, _, attribute = name.rpartition(".")
            self._owners[name] = (modules[prefix], attribute)

    def tensor(self, fqn: str) -> torch.Tensor:
        """The model's own parameter or buffer."""
        module, attribute = self._owners[fqn]
        found = getattr(module, attribute)
        assert isinstance(found, torch.Tensor)
        return found

    def persistent(self, fqn: str) -> bool:
        """Whether a buffer belongs into a state dict."""
        module, attribute = self._owners[fqn]
        return attribute not in module._non_persistent_buffers_set

    def move(self, fqns: Iterable[str], device: torch.device) -> None:
        """Put tensors on `device`, in place; raises `GraphPPError` for those that have no memory yet."""
        named = [(fqn, self.tensor(fqn)) for fqn in fqns]
        empty = [fqn for fqn, tensor in named if tensor.is_meta]
        if empty:
            raise GraphPPError(
                f"{len(empty)} tensors of this rank are on the meta device, the first is {empty[0]}: give them memory and "
                "values before the first step, e.g. model.to_empty(device=...) and load_state_dict(...)."
            )
        for _, tensor in named:
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(device)

    def select(self, fqns: Iterable[str], among: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(FQN, tensor) of `fqns`, in the order of `among`."""
        wanted = set(fqns)
        return ((fqn, self.tensor(fqn)) for fqn in among if fqn in wanted)
