"""Check the model, loss and example given to `compile`; errors name the accepted forms and the given value."""

from __future__ import annotations

from torch import nn

from graphpp.arguments import type_name
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.loss import check_signature
from graphpp.capture.objects.names import comes_with_torch
from graphpp.capture.refusals import check_modules
from graphpp.errors import BatchError, CaptureError
from graphpp.log import logger

_LOG = logger(__name__)


def check_arguments(model: object, loss: object, example: object) -> None:
    """Raise `CaptureError` for an invalid model or loss (also one with trainable parameters), `BatchError` for the example."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be an nn.Module, got {type_name(model)}")
    check_modules(model)
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise CaptureError(f"loss must be a function loss(output, target) -> scalar, or None, got {type_name(loss)}")
    if example is not None and not isinstance(example, Microbatch):
        raise BatchError(f"example must be a graphpp.Microbatch(args, kwargs, target), got {type_name(example)}")
    _check_frozen(loss)
    if callable(loss):
        check_signature(loss)


def note_hooks(model: nn.Module) -> None:
    """Log that forward hooks are traced: only their operations on tensors run in each step."""
    pairs = ((fqn, {**module._forward_hooks, **module._forward_pre_hooks}) for fqn, module in model.named_modules())
    own = [(fqn, hook) for fqn, hooks in pairs for hook in hooks.values() if not comes_with_torch(hook)]
    if own:
        fqn, hook = own[0]
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        _LOG.warning(
            f"{len(own)} forward hooks are traced with the model, {name} of module {fqn!r} for one: their operations on "
            "tensors run in each step, and other code (prints, counters, lists of activations) runs while the model is "
            "captured only. To look at values, return them from the loss as numbers to report, or run the model itself."
        )


def _check_frozen(loss: object) -> None:
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trainable = [name for name, parameter in parameters if parameter.requires_grad]
    if trainable:
        raise CaptureError(
            f"the loss has trainable parameters of its own ({', '.join(trainable[:3])}): they would never be updated. "
            "Make the loss a part of the model and pass loss=None with an output that has `.loss`."
        )
