"""Roll an optimizer's step back, bit for bit.

Contract
--------
- `take` copies all values that the optimizers' next step may change. After `restore` parameters, `optimizer.state` and
  `param_groups` have the bits, the objects and the keys of that moment; state that the step created is gone.
- Floating-point arithmetic has no exact inverse, so the step is undone from copies. The copies are on the devices of their
  originals, and the next step reuses their memory: once the bytes of parameters and state (Adam: three times the parameters').
- Optimizers outside of torch may also write into gradients and draw random numbers, so a snapshot has both for them. It has
  both too for torch's optimizers with Nesterov momentum: SGD adds the momentum into the gradients where it steps all
  parameters at once (its default on CUDA). A snapshot does not see values that an optimizer keeps in attributes of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Any

import torch

from graphpp.errors import GraphPPError

_PLAIN = (
    type(None),
    Number,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
)


class OptimizerSnapshot:
    """Copies of the values that a step of some optimizers may change."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._copies: list[torch.Tensor] = []  # by position, so that a step reuses the copies of the step before
        self._tensors: list[torch.Tensor] = []
        self._containers: list[tuple[Any, Any]] = []  # dicts and lists, with shallow copies
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def check(self) -> None:
        """Raise `GraphPPError` where `take` would, without copying."""
        for _ in self._changeable():
            pass
        self.forget()

    @torch.no_grad()
    def take(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Copy; returns False, without a snapshot, as soon as `stop()` is true: the snapshot is not needed any more.

        Raises `GraphPPError` if an optimizer holds an object that cannot be copied.
        """
        self.forget()
        for tensor in self._changeable():
            if stop():
                break
            _copy_into(self._copies, len(self._tensors), tensor)
            self._tensors.append(tensor)
        else:
            if not stop():
                return True
        self.forget()
        return False

    @torch.no_grad()
    def restore(self) -> None:
        """Put back all values of the last `take`."""
        for container, before in self._containers:
            if isinstance(container, dict):
                container.clear()
                container.update(before)
            else:
                container[:] = before
        for tensor, copy in zip(self._tensors, self._copies, strict=False):  # copies of an earlier, longer step may remain
            tensor.copy_(copy)
        for generator, state in self._generators:
            generator.set_state(state)

    def forget(self) -> None:
        """Drop the snapshot but for the memory of its copies, so that tensors which the user exchanges are freed."""
        self._tensors, self._containers, self._generators = [], [], []

    def _changeable(self) -> Iterator[torch.Tensor]:
        """The tensors that a step may change; records containers and generators on the way."""
        for optimizer in self._optimizers:
            yield from self._walk(optimizer.param_groups, "param_groups")
            yield from self._walk(optimizer.state, "state")
            if _writes_gradients(optimizer):
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                self._generators += [(g, g.get_state()) for g in _generators(gradients)]
                yield from gradients

    def _walk(self, value: object, where: str) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            self._containers.append((value, dict(value)))
            for key, part in value.items():
                yield from self._walk(part, f"{where}[{key!r}]" if isinstance(key, str) else where)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self._containers.append((value, list(value)))
            for part in value:
                yield from self._walk(part, where)
        elif not isinstance(value, _PLAIN):
            raise GraphPPError(
                f"an optimizer's {where} holds a {type(value).__name__}, and a step that changes it cannot be taken back. "
                "Tensors, numbers, strings, and dicts, lists and tuples of them can be: use pipe.clip_grad_norm_ and "
                "optimizer.step() with this optimizer."
            )


def _writes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may change gradients and draw random numbers."""
    own = type(optimizer).__module__.partition(".")[0] == "torch"
    return not own or any(group.get("nesterov") for group in optimizer.param_groups)


def _copy_into(copies: list[torch.Tensor], index: int, tensor: torch.Tensor) -> None:
    """Make copies[index] a copy of the tensor, in the memory of the copy there if it fits."""
    if index == len(copies):
        copies.append(tensor.detach().clone())
        return
    copy = copies[index]
    if (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device):
        copy.copy_(tensor)
    else:
        copies[index] = tensor.detach().clone()


def _generators(tensors: Sequence[torch.Tensor]) -> list[torch.Generator]:
    """The default generators of the CPU and of the tensors' CUDA devices."""
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(devices))]
