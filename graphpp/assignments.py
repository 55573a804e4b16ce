"""What a traced forward assigns to attributes of its modules: `self.state = new`.

Contract: after `undone`, every module has the attributes, buffers and hooks that it had before, even where the forward
raised, and `Assigned` tells what there was instead: the new values of buffers, which the trace returns as further results
(export keeps assignments to buffers of its root module only, and drops the others), and the tensors that are no buffers
and were replaced: if the graph reads such a one as a constant, it would do so forever, and `refuse_stale` raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphpp.errors import CaptureError


@dataclass
class Assigned:
    """New values of buffers by FQN, as results of their own; tensors in other attributes that were replaced."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)

    def refuse_stale(self, constants: Iterable[torch.Tensor]) -> None:
        """Raise `CaptureError` if a replaced tensor is a constant of the graph."""
        held = {id(constant) for constant in constants}
        for name, tensor in self.replaced.items():
            if id(tensor) in held:
                raise CaptureError(
                    f"the forward reads the tensor {name} and replaces it, and it is no buffer: its first value would "
                    "be used in every step. Register it with register_buffer."
                )


@contextlib.contextmanager
def undone(model: nn.Module, assigned: Assigned) -> Iterator[None]:
    """Note in `assigned` what the forward inside assigns, and undo it."""
    before = [_Before(name, module) for name, module in model.named_modules()]
    try:
        yield
        for module in before:
            module.note_assigned(assigned)
    finally:
        for module in before:
            module.restore()


class _Before:
    """What a module had before the forward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.prefix = f"{name}." if name else ""
        self.module = module
        self.attributes, self.buffers = dict(vars(module)), dict(module._buffers)
        held = vars(module).items()
        self.hooks = [(value, dict(value)) for key, value in held if "_hooks" in key and isinstance(value, dict)]

    def note_assigned(self, assigned: Assigned) -> None:
        for key, old in _replaced(vars(self.module), self.attributes):
            assigned.replaced[self.prefix + key] = old
        for key, old in _replaced(self.module._buffers, self.buffers):
            assigned.buffers[self.prefix + key] = _new_value(self.prefix + key, old, self.module._buffers.get(key))

    def restore(self) -> None:
        _restore(self.module._buffers, self.buffers)
        _restore(vars(self.module), self.attributes)
        for hooks, before in self.hooks:
            _restore(hooks, before)


def _replaced(now: dict[str, Any], before: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    pairs = before.items()
    return [(name, old) for name, old in pairs if isinstance(old, torch.Tensor) and now.get(name) is not old]


def _new_value(fqn: str, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        found = "removes it" if new is None else f"assigns {list(new.shape)} {new.dtype}"
        raise CaptureError(
            f"the buffer {fqn} is {list(old.shape)} {old.dtype}, and the forward {found}: "
            "a buffer keeps its shape and dtype from step to step."
        )
    return new.detach().clone()  # it may be another buffer


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)
