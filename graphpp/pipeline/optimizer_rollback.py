"""Take an optimizer's step back, bit for bit.

Contract
--------
- `keep` copies what the optimizers' next step may change; after `back` all of it has the bits, the objects and the keys
  that it had: parameters, what stands in `optimizer.state` and in `param_groups`. State that the step made is gone.
- Arithmetic has no exact inverse in floating point, so nothing is computed back: the copies lie beside the originals, on
  their devices, and their memory is used again in the next step. They cost one times the parameters and the state (Adam:
  three times the parameters' bytes).
- An optimizer that is not torch's own may also write into gradients and draw random numbers: both are kept for it too, and
  for torch's with Nesterov momentum, which SGD adds into the gradients where it steps all parameters at once (its default
  on CUDA). Whatever it remembers elsewhere (attributes of its own) is not seen.
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
    """What some optimizers may change in a step, kept."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._copies: list[torch.Tensor] = []  # by position: a step finds what the one before it made
        self._tensors: list[torch.Tensor] = []
        self._containers: list[tuple[Any, Any]] = []  # dicts and lists, and shallow copies of them
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def check(self) -> None:
        """Raise `GraphPPError` where `keep` would, without copying."""
        for _ in self._changeable():
            pass
        self.forget()

    @torch.no_grad()
    def keep(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Copy; False, and nothing to go back to, as soon as `stop()` says that there is no need for it any more.

        Raises `GraphPPError` where an optimizer holds something that this cannot copy.
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
    def back(self) -> None:
        """Make everything what it was at the last `keep`."""
        for container, before in self._containers:
            if isinstance(container, dict):
                container.clear()
                container.update(before)
            else:
                container[:] = before
        for tensor, copy in zip(self._tensors, self._copies, strict=False):  # copies of a longer step may be left over
            tensor.copy_(copy)
        for generator, state in self._generators:
            generator.set_state(state)

    def forget(self) -> None:
        """Let go of what was kept, but for the memory of the copies: state that is exchanged is not held on to."""
        self._tensors, self._containers, self._generators = [], [], []

    def _changeable(self) -> Iterator[torch.Tensor]:
        """The tensors; containers and generators are noted on the way."""
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
    """Whether a step may change gradients."""
    own = type(optimizer).__module__.partition(".")[0] == "torch"
    return not own or any(group.get("nesterov") for group in optimizer.param_groups)


def _copy_into(copies: list[torch.Tensor], index: int, tensor: torch.Tensor) -> None:
    """Make copies[index] a copy of the tensor, in the memory that is there if it fits."""
    if index == len(copies):
        copies.append(tensor.detach().clone())
        return
    there = copies[index]
    if (there.shape, there.dtype, there.device) == (tensor.shape, tensor.dtype, tensor.device):
        there.copy_(tensor)
    else:
        copies[index] = tensor.detach().clone()


def _generators(tensors: Sequence[torch.Tensor]) -> list[torch.Generator]:
    """The default generators of the CPU and of the tensors' CUDA devices."""
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(devices))]
