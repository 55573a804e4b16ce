"""Read the result of a loss function: a scalar, or a scalar and numbers to report.

Contract: the loss of one microbatch is a 0-dim tensor, a reported number a 0-dim tensor without a gradient. `CaptureError` is
raised for results of other shapes or types.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphpp.errors import CaptureError
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]]


def loss_and_metrics(loss: LossFunction | None, output: Any, target: Any) -> list[tuple[OutputRole, torch.Tensor]]:
    """The loss, and the numbers that the loss function reports with it; raises `CaptureError` for other types."""
    value: Any = _loss_of_output(output) if loss is None else loss(output, target)
    metrics: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    reported = [(program.Metric(str(name)), _number(str(name), number)) for name, number in metrics.items()]
    if len({role.name for role, _ in reported}) < len(reported):
        raise CaptureError(f"two of the numbers that the loss returned to report have one name: {list(metrics)}")
    return [(program.Loss(), _scalar(value)), *reported]


def _loss_of_output(output: Any) -> Any:
    """The `.loss` of the model's output, as Hugging Face models return it."""
    value = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if value is None:
        returned = "Tensor" if isinstance(output, torch.Tensor) else type(output).__name__  # not FakeTensor
        raise CaptureError(
            f"loss=None takes the output's own `.loss`, but the model returned {returned} without one. "
            "Pass loss=your_function(output, target), or give the model its labels."
        )
    return value


def _number(name: str, value: Any) -> torch.Tensor:
    """A reported number as a 0-dim tensor without a gradient."""
    if isinstance(value, numbers.Real):
        whole = isinstance(value, numbers.Integral)
        return torch.full((), float(value), dtype=torch.int64 if whole else torch.get_default_dtype())
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"the loss returned {name!r} among the numbers to report, and it is no number, but {found}: "
            "reduce it, e.g. with `.mean()`; leave it a tensor, without `.item()`."
        )
    return value.detach().reshape(())


def _scalar(value: Any) -> torch.Tensor:
    """The loss of one microbatch as a 0-dim tensor. Raises `CaptureError` if it has more than one element."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"the loss must be a scalar tensor, got {found}. Reduce it, e.g. with `.mean()`. A loss function may also return "
            "a tuple: the scalar, and a dict of numbers to report."
        )
    return value if value.dim() == 0 else value.reshape(())
