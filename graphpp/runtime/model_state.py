"""The model's tensors under their FQNs: what a rank's stages read, update and hand to the optimizer.

Contract
--------
- One name per tensor (the first in the model's order); the objects are the model's own, moved to the device in place.
- `tensor(fqn)` reads the module anew at each call, so a parameter object that the user exchanged is seen.
- State dicts are parts of the model's own: every alias of a tensor, no buffer that is not persistent.
- A tensor still on the meta device cannot run: `GraphPPError` says how to give it memory.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphpp.errors import GraphPPError


class ModelState:
    """Parameters and buffers of `model` by FQN."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = [name for name, _ in model.named_parameters()]
        self.buffers = [name for name, _ in model.named_buffers()]
        first: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for name, value in own_tensors(module):
                first.setdefault(id(value), (module, name))
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._owners = {name: first[id(value)] for name, value in tensors}

    def tensor(self, fqn: str) -> torch.Tensor:
        """The model's own parameter or buffer."""
        module, attribute = self._owners[fqn]
        found = getattr(module, attribute)
        assert isinstance(found, torch.Tensor)
        return found

    def named(self, fqns: Collection[str], among: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(FQN, tensor) of `fqns`, in the order of `among`."""
        return ((fqn, self.tensor(fqn)) for fqn in among if fqn in fqns)

    def move(self, fqns: Iterable[str], device: torch.device) -> None:
        """Put tensors on `device`, in place."""
        for fqn in fqns:
            tensor = self.tensor(fqn)
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(device)

    def check_memory(self, fqns: Iterable[str]) -> None:
        """Raise `GraphPPError` for tensors that have no memory yet."""
        _refuse_meta([fqn for fqn in fqns if self.tensor(fqn).is_meta])

    def state_dict(self, fqns: Iterable[str]) -> dict[str, Any]:
        """Entries of the model's state dict that hold these tensors, under every alias, and those without a tensor."""
        mine = {id(self.tensor(fqn)) for fqn in fqns}
        entries = self._model.state_dict(keep_vars=True).items()
        own_tensors = {key: value for key, value in entries if not isinstance(value, torch.Tensor) or id(value) in mine}
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in own_tensors.items()}

    def load(self, fqns: Collection[str], state: Mapping[str, Any], strict: bool) -> None:
        """Copy the entries that hold these tensors into the model, in place; `GraphPPError` and no change if unfit."""
        mine = {key: value for key, value in self.state_dict(fqns).items() if isinstance(value, torch.Tensor)}
        if strict:
            missing = [key for key in mine if key not in state]
            unknown = [key for key in state if key not in self._model.state_dict(keep_vars=True)]
            _refuse(("missing", missing), ("unknown to the model", unknown))
        pairs = {key: (value, state[key]) for key, value in mine.items() if key in state}
        wrong = [
            f"{key} {list(new.shape)} instead of {list(old.shape)}"
            for key, (old, new) in pairs.items()
            if new.shape != old.shape
        ]
        _refuse(("of another shape", wrong))
        _refuse_meta([key for key, (old, _) in pairs.items() if old.is_meta])
        with torch.no_grad():
            for old, new in pairs.values():
                old.copy_(new)


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What a module itself holds; a wrapper around the model may list it under other FQNs than its place has."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def checksum(tensor: torch.Tensor) -> int:
    """An integer that equal bits always give, and different bits hardly ever."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(width).sum())


def _refuse_meta(names: list[str]) -> None:
    if names:
        raise GraphPPError(
            f"{len(names)} tensors of this rank are on the meta device, {names[0]!r} for one: they have no values. "
            "Give them memory with model.to_empty(device=...), then values, e.g. with load_state_dict(...). Buffers "
            "that no state dict holds must be computed again."
        )


def _refuse(*faults: tuple[str, list[str]]) -> None:
    """Raise `GraphPPError` with the first few names of each fault, if there are any."""
    found = [f"{len(names)} entries {what}: {', '.join(names[:3])}" for what, names in faults if names]
    if found:
        raise GraphPPError("the state dict does not fit this rank's part of the model: " + "; ".join(found))


@contextlib.contextmanager
def state_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run something on the model, from no gradients; afterwards state, attributes and random numbers are as before."""
    stores = [s for module in model.modules() for s in (module.__dict__, module._parameters, module._buffers)]
    kept = [(store, dict(store)) for store in stores]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    of_python = random.getstate()
    try:
        for parameter, _ in grads:
            parameter.grad = None
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(of_python)
        for store, before in kept:
            store.clear()
            store.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad


def tensor_lines(model: nn.Module) -> list[str]:
    """A line per parameter and buffer: FQN, shape, dtype, whether it is trained."""
    parameters = [f"{name} {_meta(p)}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters()]
    return parameters + [f"{name} {_meta(buffer)}, buffer" for name, buffer in model.named_buffers()]


def _meta(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
