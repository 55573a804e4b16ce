"""Stand-ins for parameters and buffers that other ranks have: no memory, and an error for everything that reads their values.

- `released(tensor, fqn, rank)` is a stand-in on the meta device with the shape, strides, dtype, `requires_grad` and attributes
  of `tensor`, which can be read. Reading its values, its gradient or a copy of it raises `GraphPPError`, which names the
  parameter, the rank that has it, and the pipeline's call to use instead. `module.zero_grad`, `.to` and `.half` work: a
  stand-in has no gradient, is on every device, and takes another dtype.
- `forget` notes parameters that other tensors have replaced. An optimizer that was made before, with one of them, raises
  `GraphPPError` at its first step; it drops those of `dropped`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp._torch import pytree
from graphpp._torch.parallel.sharded_tensor import is_dtensor_class
from graphpp._torch.tensor_subclass import (
    CONVERSIONS,
    FACTS,
    GET_GRAD,
    GRADIENT_HABITS,
    SET_DATA,
    SET_GRAD,
    made,
    without_subclasses,
)
from graphpp.errors import GraphPPError

_ADVICE = (
    "Call pipe.parameters() for an optimizer, pipe.clip_grad_norm_, pipe.zero_grad, pipe.eval for the output, pipe.checkpoint "
    "or pipe.state_dict to save, and pipe.gather for the values of other ranks"
)


class _Original(NamedTuple):
    """The tensor that a stand-in replaces: its FQN, the rank that has it, its class, and the object while somebody holds it."""

    fqn: str
    rank: int
    kind: type[torch.Tensor]
    tensor: Callable[[], torch.Tensor | None]


_HOLDERS = WeakTensorKeyDictionary()  # a stand-in -> its `_Original`


class _Released(torch.Tensor):
    """A tensor without values that answers questions about its shape and refuses all else."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about the shape, and do the part of a module's habits that needs no value; raise for all else."""
        standing = [leaf for leaf in pytree.tree_flatten((args, kwargs))[0] if isinstance(leaf, _Released)]
        if function in FACTS or (function == SET_GRAD and args[1] is None):
            with without_subclasses():
                return function(*args, **(kwargs or {}))
        if function in CONVERSIONS and len(standing) == 1 and standing[0] is args[0]:
            return _converted(function, *args, **(kwargs or {}))
        if function == SET_DATA and len(standing) == 2:
            with without_subclasses():
                return function(*args)
        if function == GET_GRAD and sys._getframe(1).f_code in GRADIENT_HABITS:
            return None
        fqn, rank, *_ = _HOLDERS[standing[0]]
        raise GraphPPError(
            f"{fqn} has no values on this rank: rank {rank} of the pipeline holds it, and its memory here was given back. "
            f"{_ADVICE}"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub has a nameless argument
        fqn, rank, *_ = _HOLDERS[self]
        return f"<{fqn}, which rank {rank} holds: {list(self.shape)} {self.dtype}>"


def _converted(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The stand-in itself, or one with the dtype and the memory format that a conversion asks for."""
    layout = {key: each for key, each in kwargs.items() if key == "memory_format"}
    with without_subclasses():
        dtype = function(torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device="cpu"), *args, **kwargs).dtype
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta").contiguous(**layout)
    if dtype == tensor.dtype and not layout:
        return tensor
    found = made(type(tensor), blank, tensor.requires_grad)
    vars(found).update(vars(tensor))
    _HOLDERS[found] = _HOLDERS[tensor]
    return found


class ReleasedParameter(_Released, nn.Parameter):
    """The stand-in for a parameter."""


class ReleasedBuffer(_Released):
    """The stand-in for a buffer."""


def released(tensor: torch.Tensor, fqn: str, rank: int) -> torch.Tensor:
    """The stand-in for a tensor that `rank` has."""
    blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    kind: type[_Released] = ReleasedParameter if isinstance(tensor, nn.Parameter) else ReleasedBuffer
    found = made(kind, blank, tensor.requires_grad)
    vars(found).update(vars(tensor))
    _HOLDERS[found] = _Original(fqn, rank, type(tensor), weakref.ref(tensor))
    return found


def like(tensor: torch.Tensor, blank: torch.Tensor) -> torch.Tensor:
    """`blank` with the class, `requires_grad` and attributes of `tensor`; a stand-in counts as the tensor it replaces.

    For a `DTensor`, a plain parameter or tensor, with all its values on this rank.
    """
    kind = class_of(tensor)
    if is_dtensor_class(kind):
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    found = made(kind, blank, tensor.requires_grad)
    vars(found).update(vars(tensor))
    return found


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of a tensor; for a stand-in, of the tensor it replaces."""
    return _HOLDERS[tensor].kind if isinstance(tensor, _Released) else type(tensor)


def original(tensor: torch.Tensor) -> torch.Tensor:
    """The object that a stand-in replaced if somebody holds it, else a blank one of its class; any other tensor itself."""
    replaced = _HOLDERS[tensor].tensor() if isinstance(tensor, _Released) else tensor
    return like(tensor, tensor) if replaced is None else replaced


def is_released(tensor: object) -> bool:
    return isinstance(tensor, _Released)


_FORGOTTEN = WeakTensorKeyDictionary()  # a parameter that was replaced -> its FQN, and where it is trained now
_DROPPED = WeakTensorKeyDictionary()  # parameters that optimizers drop
_CHECKED: WeakSet[Optimizer] = WeakSet()


def forget(replaced: Iterable[tuple[torch.Tensor, str]], now: str) -> None:
    """Note replaced parameters with their FQNs; `now` says where they are trained."""
    _watch_optimizers()
    _FORGOTTEN.update((tensor, (fqn, now)) for tensor, fqn in replaced)
    _CHECKED.clear()


def dropped(parameters: Iterable[torch.Tensor]) -> None:
    """Let optimizers that hold these parameters drop them at their next step."""
    _watch_optimizers()
    _DROPPED.update((each, True) for each in parameters)
    _CHECKED.clear()


def drop(optimizer: Optimizer) -> None:
    """Take the parameters of `dropped` out of an optimizer."""
    for group in optimizer.param_groups:
        if any(each in _DROPPED for each in group["params"]):
            group["params"][:] = [each for each in group["params"] if each not in _DROPPED]
    for each in [each for each in optimizer.state if isinstance(each, torch.Tensor) and each in _DROPPED]:
        del optimizer.state[each]


@functools.cache
def _watch_optimizers() -> None:
    """Register a hook that checks every optimizer of the process at its first step."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: _check(optimizer))


def _check(optimizer: Optimizer) -> None:
    if optimizer in _CHECKED:
        return
    drop(optimizer)
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found = [_FORGOTTEN[parameter] for parameter in held if parameter in _FORGOTTEN]
    if found:
        fqn, now = found[0]
        raise GraphPPError(
            f"the optimizer holds {len(found)} parameters that are no longer the model's, {fqn} for one: {now}. Make the "
            "optimizer of pipe.parameters() after pipe.materialize and pipe.release"
        )
    _CHECKED.add(optimizer)
