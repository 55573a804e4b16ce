"""Call a loss function and check its result: a scalar, or a scalar and metrics.

Contract
--------
- The loss of one microbatch is a 0-dim tensor, a metric a 0-dim tensor without a gradient. `CaptureError` is raised for results
  of other shapes or types.
- A loss function takes (output) or (output, target), and the keyword arguments `loss_kwargs` of the call. Without a target a
  second parameter keeps its default, or gets None; `BatchError` is raised if the function then fails.
"""

from __future__ import annotations

import inspect
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphpp.arguments import unfit
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.source_lines import user_frame
from graphpp.errors import BatchError, CaptureError
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole

LossFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]]


def check_signature(loss: LossFunction, loss_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise `CaptureError` unless a loss takes (output) or (output, target). `loss_kwargs`: of the call; None: unknown."""
    called = loss.forward if isinstance(loss, nn.Module) else loss
    fault = unfit(called, 2, loss_kwargs)
    if fault is not None and unfit(called, 1, loss_kwargs) is not None:
        name = getattr(called, "__qualname__", type(called).__qualname__)
        remedy = ": further arguments are given by name, as loss_kwargs= of pipe.step" * fault.startswith("missing")
        raise CaptureError(f"loss must take (output) or (output, target), and {name} does not: {fault}{remedy}")


def takes_target(loss: LossFunction) -> bool:
    positional, several = _positional(loss)
    return several or len(positional) > 1


def needs_target(loss: LossFunction) -> bool:
    positional, several = _positional(loss)
    return positional[1].default is inspect.Parameter.empty if len(positional) > 1 else several


def has_loss(loss: LossFunction | None, output: Any, batch: Microbatch) -> bool:
    """Whether an evaluation has a loss: a target was given, the loss function needs none, or the output has a loss."""
    if batch.target is not None:
        return True
    return _of_output(output) is not None if loss is None else not needs_target(loss)


def loss_and_metrics(loss: LossFunction | None, output: Any, batch: Microbatch) -> list[tuple[OutputRole, torch.Tensor]]:
    """The loss and the metrics that the loss function returns; raises `CaptureError` for other types."""
    value: Any = _loss_of_output(output) if loss is None else _called(loss, output, batch)
    metrics: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    reported = [(program.Metric(str(name)), _number(str(name), number)) for name, number in metrics.items()]
    if len({role.name for role, _ in reported}) < len(reported):
        raise CaptureError(f"two of the numbers that the loss returned to report have one name: {list(metrics)}")
    return [(program.Loss(), _scalar(value)), *reported]


def _positional(loss: LossFunction) -> tuple[list[inspect.Parameter], bool]:
    """The positional parameters, and whether the function has `*args`."""
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return [], True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    several = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return [each for each in parameters if each.kind in kinds], several


def runs_loss(error: BaseException) -> bool:
    """Whether an exception was raised inside a loss function or by calling one."""
    return any(frame.f_code is _called.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _called(loss: LossFunction, output: Any, batch: Microbatch) -> Any:
    """The result of a loss function. Raises `BatchError` if the function fails without a target."""
    check_signature(loss, batch.loss_kwargs)
    if batch.target is not None:
        return loss(output, batch.target, **batch.loss_kwargs)
    try:
        return loss(output, *[None] * needs_target(loss), **batch.loss_kwargs)
    except CaptureError:
        raise
    except Exception as error:
        if not takes_target(loss):
            raise
        first = str(error).partition("\n")[0]
        raise BatchError(
            "the loss needs a target: step(..., target=...), or Microbatch(args, kwargs, target). Without one it raised "
            f"{type(error).__name__}: {first}\n  at {user_frame(traceback.extract_tb(error.__traceback__)) or 'its call'}"
        ) from error


def _of_output(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _loss_of_output(output: Any) -> Any:
    value = _of_output(output)
    if value is None:
        returned = "Tensor" if isinstance(output, torch.Tensor) else type(output).__name__  # not FakeTensor
        raise CaptureError(
            f"loss=None takes the output's own `.loss`, but the model returned {returned} without one. "
            "Pass loss=your_function(output, target), or give the model its labels."
        )
    return value


def _number(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, numbers.Real | torch.SymInt | torch.SymFloat):
        whole = isinstance(value, numbers.Integral | torch.SymInt)
        kind: Any = int if whole else float
        plain: Any = value if isinstance(value, torch.SymInt | torch.SymFloat) else kind(value)
        return torch.full((), plain, dtype=torch.int64 if whole else torch.get_default_dtype())
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"the loss returned {name!r} among the numbers to report, and it is no number, but {found}: "
            "reduce it, e.g. with `.mean()`; leave it a tensor, without `.item()`."
        )
    return value.detach().reshape(())


def _scalar(value: Any) -> torch.Tensor:
    """The loss of one microbatch as a 0-dim tensor. Raises `CaptureError` for other values."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"the loss must be a scalar tensor, got {found}. Reduce it, e.g. with `.mean()`. A loss function may also return "
            "a tuple: the scalar, and a dict of numbers to report."
        )
    if value.is_complex():
        raise CaptureError(f"the loss is of {value.dtype}, and a gradient needs a real number: return e.g. its `.abs()`")
    if value.is_floating_point() and value.dtype.itemsize == 1:
        raise CaptureError(f"the loss is of {value.dtype}, in which no gradient can be scaled: return it in float32")
    return value if value.dim() == 0 else value.reshape(())
