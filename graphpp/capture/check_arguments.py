"""The model, the loss and the example that `compile` is given, checked before anything is made of them.

Contract: each function raises a `GraphPPError` that says what the argument must be and what it is.
"""

from __future__ import annotations

from torch import nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.refusals import check_modules
from graphpp.errors import BatchError, CaptureError


def check_arguments(model: object, loss: object, example: object) -> None:
    """Raise `CaptureError` for a model or loss, `BatchError` for an example, of another type or with its own parameters."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be an nn.Module, got {type(model).__name__}")
    check_modules(model)
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"loss must be a function loss(output, target) -> scalar, or None, got {type(loss).__name__}"
        )
    if example is not None and not isinstance(example, Microbatch):
        raise BatchError(f"example must be a graphpp.Microbatch(args, kwargs, target), got {type(example).__name__}")
    _check_frozen(loss)


def _check_frozen(loss: object) -> None:
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trainable = [name for name, parameter in parameters if parameter.requires_grad]
    if trainable:
        raise CaptureError(
            f"the loss has trainable parameters of its own ({', '.join(trainable[:3])}): they would never be updated. "
            "Make the loss a part of the model and pass loss=None with an output that has `.loss`."
        )
