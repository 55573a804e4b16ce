"""Functions of a trainer that compute the loss and read values of tensors for their metrics (`.item()`, `if count > 0`).

Contract
--------
- Such a function runs twice for a microbatch. The capture runs the function within `reads_postponed`, where a read returns a
  placeholder: `Unread`, or True for a branch. After the step the function runs on the actual outputs of the model, and reads
  return the actual values; `read_values` compares its loss with the loss of the pipeline.
- So metrics have actual values, and no value that is read moves the loss by more than `_TOLERANCE`. `GraphPPError` is raised
  by the capture where a placeholder enters an operation of torch, or has to be an integer, and by `read_values` where a branch
  changes the loss.
- The plain attributes of the trainer (numbers, and lists and dicts of numbers) are after a capture as before. `log` of the
  trainer logs nothing in a capture, and raises `GraphPPError` where reads are not postponed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import graphpp
from graphpp.errors import GraphPPError
from graphpp.integrations.stand_in import answering

_DATA = ("train_dataset", "eval_dataset")  # may be long lists
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of other dtypes 3e-2; a backend may order sums anew


class Unread(float):
    """A number that a capture cannot know: a result of arithmetic with one is one, and a comparison is true."""

    __slots__ = ()

    def __new__(cls, *_: Any) -> Unread:
        return super().__new__(cls, math.nan)

    def _unread(self, *_: Any) -> Unread:
        return Unread()

    def _true(self, *_: Any) -> bool:
        return True

    def _no_integer(self, *_: Any) -> NoReturn:
        _refuse("as an integer")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unread
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _unread
    __neg__ = __pos__ = __abs__ = __round__ = _unread  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _true
    __int__ = __index__ = __trunc__ = __floor__ = __ceil__ = _no_integer
    __hash__ = float.__hash__


def _refuse(use: str) -> NoReturn:
    raise GraphPPError(
        f"compute_loss uses a number that it reads from a tensor {use}, and a captured loss does not have the numbers of later "
        "batches: keep the number a tensor, without .item(), or compute it from the inputs in the data collator"
    )


def _unread_list(tensor: Tensor) -> Any:
    if tensor.dim() and not all(type(size) is int for size in tensor.shape):
        _refuse("in a list whose length varies")
    return [_unread_list(row) for row in tensor] if tensor.dim() else Unread()


_READS: Mapping[Any, Callable[[Tensor], Any]] = {
    Tensor.item: lambda _: Unread(),
    Tensor.__float__: lambda _: math.nan,  # Python refuses a subclass of float here; nan shows in the loss
    Tensor.__bool__: lambda _: True,
    Tensor.tolist: _unread_list,
    Tensor.__int__: lambda _: _refuse("as an integer"),
    Tensor.__index__: lambda _: _refuse("as an integer"),
    Tensor.numpy: lambda _: _refuse("through numpy"),
}


class _Reads(TorchFunctionMode):
    def __init__(self, postponed: bool) -> None:
        super().__init__()
        self._postponed = postponed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            if not self._postponed:
                raise GraphPPError(
                    f"compute_loss reads the value of a tensor, by {func.__name__}, and a captured loss has no values. If the "
                    "value goes into metrics only, set reads_values = True in the class of the trainer: compute_loss then runs "
                    "once more after each step, on the outputs of the model. If the loss needs the value, keep it a tensor"
                )
            return _READS[func](args[0])
        if _has_unread((args, kwargs or {})):
            _refuse(f"in {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


def _has_unread(value: Any) -> bool:
    if isinstance(value, slice):
        return _has_unread((value.start, value.stop, value.step))
    if isinstance(value, list | tuple | dict):
        return any(map(_has_unread, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Unread)


@contextlib.contextmanager
def reads_postponed(trainer: Any, postponed: bool) -> Iterator[None]:
    """A context for the capture of a trainer's loss. Where reads are not `postponed`, a read raises `GraphPPError`."""
    before = {name: copy.deepcopy(value) for name, value in vars(trainer).items() if name not in _DATA and _is_plain(value)}
    names = set(vars(trainer))
    own = vars(trainer).get("log")
    vars(trainer)["log"] = _no_log if postponed else _refused_log
    try:
        with _Reads(postponed):
            yield
    finally:
        vars(trainer).update({} if own is None else {"log": own})
        for name in vars(trainer).keys() - names:
            delattr(trainer, name)
        vars(trainer).update(before)


def _no_log(*_: Any, **__: Any) -> None:
    """`log` of a capture: the call of `read_values` logs."""


def _refused_log(*_: Any, **__: Any) -> NoReturn:
    raise GraphPPError(
        "compute_loss calls self.log, and a captured loss runs once and has no values: set reads_values = True in the class of "
        "the trainer, and compute_loss runs once more after each step, on the outputs of the model"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value).__module__ in ("builtins", "collections") and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple, set, deque) else type(value) in _ATOMS


def read_values(trainer: Any, parts: list[dict[str, Any]], result: graphpp.StepResult, items: Any) -> None:
    """Call `compute_loss` for its metrics, on the actual output of each microbatch of a step.

    Raises `GraphPPError` unless its loss is the pipeline's.
    """
    for place, (part, output, expected) in enumerate(zip(parts, result.output, result.losses, strict=True)):
        model = answering(trainer.model, output, "compute_loss")
        with torch.no_grad():
            _check(trainer.compute_loss(model, dict(part), num_items_in_batch=items), expected, place)


def _check(loss: Tensor, expected: Tensor, place: int) -> None:
    tolerance = _TOLERANCE.get(expected.dtype, 3e-2)
    if not torch.isclose(loss.to(expected), expected, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True):
        raise GraphPPError(
            f"the loss of microbatch {place} is {float(expected)} in the captured pipeline, and {float(loss)} where "
            "compute_loss has the actual values: a value that it reads, or a branch on one, changes the loss. Compute the loss "
            "of tensors alone (torch.where in place of a branch), and read values for metrics only"
        )


def with_outputs(memory: Any) -> graphpp.Memory:
    """The option `memory` of `graphpp.compile`, with the outputs of steps kept."""
    form = memory if isinstance(memory, graphpp.Memory) else graphpp.Memory(recompute=memory)
    return dataclasses.replace(form, outputs=True)
