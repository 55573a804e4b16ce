"""What a traced forward assigns to attributes of its modules: `self.state = new`.

Contract: when `written` closes, every module has the attributes and buffers that it had before. A buffer that was assigned
has been written in place instead, so that the trace keeps it as a buffer's new value (export itself does so for buffers of
its root module only, and drops the others). A tensor that is no buffer and was replaced is noted in `Replaced`: if the
graph reads the old one as a constant, it would do so forever, and `refuse_stale` raises.
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
class Replaced:
    """Tensors that stood in attributes and were replaced, with the attributes' names."""

    found: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def refuse_stale(self, constants: Iterable[torch.Tensor]) -> None:
        """Raise `CaptureError` if a replaced tensor is a constant of the graph."""
        held = {id(constant) for constant in constants}
        for name, tensor in self.found:
            if id(tensor) in held:
                raise CaptureError(
                    f"the forward reads the tensor {name} and replaces it, and it is no buffer: its first value would be "
                    "used in every step. Register it with register_buffer."
                )


@contextlib.contextmanager
def written(model: nn.Module, replaced: Replaced) -> Iterator[None]:
    """Undo what the forward inside assigns; buffers are written in place instead."""
    before = [(name, module, dict(vars(module)), dict(module._buffers)) for name, module in model.named_modules()]
    yield
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, module, attributes, buffers in before:
        changed += _changed_buffers(name, module._buffers, buffers)
        replaced.found += _replaced(name, vars(module), attributes)
        _restore(module._buffers, buffers)
        _restore(vars(module), attributes)
    with torch.no_grad():
        copies = [new.clone() for _, new in changed]  # one may be the old value of another
        for (buffer, _), copy in zip(changed, copies, strict=True):
            buffer.copy_(copy)


def _changed_buffers(prefix: str, now: dict[str, Any], before: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(buffer, what was assigned to it)."""
    pairs = []
    for name, old in before.items():
        new = now.get(name)
        if old is None or new is old:
            continue
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            found = "removes it" if new is None else f"assigns {list(new.shape)} {new.dtype}"
            raise CaptureError(
                f"the buffer {_join(prefix, name)} is {list(old.shape)} {old.dtype}, and the forward {found}: "
                "a buffer keeps its shape and dtype from step to step."
            )
        pairs.append((old, new))
    return pairs


def _replaced(prefix: str, now: dict[str, Any], before: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [
        (_join(prefix, name), old)
        for name, old in before.items()
        if isinstance(old, torch.Tensor) and now.get(name) is not old
    ]


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
