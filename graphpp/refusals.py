"""What a trace would lose without a word, and so make gradients wrong: refused before or while the model is traced.

Contract: `check_model` and, while `refusing` is open, tracing itself raise `CaptureError` with the FQN or the user's line for

- a Python `autograd.Function`: export traces through its forward and drops its backward;
- hooks on gradients, of parameters or of values in the forward: the graph's gradients would pass them by;
- two parameters in one memory (tied by `.data`): ranks would each train a copy.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from graphpp.errors import CaptureError
from graphpp.roles import is_user_file

# Functions of torch itself that change no gradient, or implement registered and higher-order operators, which export keeps.
_KEPT = ("torch._library.", "torch._higher_order_ops.", "torch._functorch.", "torch.utils.checkpoint")


def check_model(model: nn.Module) -> None:
    """Refuse what is wrong about the parameters before anything is traced."""
    _refuse_hooks(model)
    _refuse_shared_memory(model)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Refuse what the forward does that a trace would lose."""
    with _patched(torch.autograd.Function, "apply", _applied()), _patched(torch.Tensor, "register_hook", _hooked):
        yield


def user_frame(stack: traceback.StackSummary) -> str:
    """`file:line in function: text` of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(stack):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "(no line of the model's own code)"


def _refuse_hooks(model: nn.Module) -> None:
    for fqn, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"the parameter {fqn} has gradient hooks: gradients do not pass through autograd here, so a hook would "
                "never be called. Remove it, and do its work on param.grad after pipe.step(...)."
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    found: dict[int, str] = {}
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta or type(parameter) is not nn.Parameter or not parameter.numel():
            continue
        other = found.setdefault(parameter.data_ptr(), fqn)
        if other != fqn:
            raise CaptureError(
                f"the parameters {other} and {fqn} are two objects in one memory (tied by .data?): their gradients would "
                f"not be added. Tie them as one parameter: set the attribute {fqn} to the parameter {other} itself."
            )


@contextlib.contextmanager
def _patched(owner: type, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _applied() -> Any:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # same numbers without it: run(function, keep_random_state, *its arguments)
            return args[0](*args[2:])
        if cls.__module__.startswith(_KEPT):
            return original.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the model uses the custom autograd.Function {cls.__qualname__} at {user_frame(traceback.extract_stack())}: "
            "torch.export would drop its backward and the gradients would be silently wrong. Write it with "
            "differentiable torch operations, or register it as an operator with torch.library.custom_op and "
            "register_autograd."
        )

    return classmethod(apply)


def _hooked(tensor: torch.Tensor, hook: Any) -> NoReturn:
    raise CaptureError(
        f"the forward hooks a gradient with Tensor.register_hook at {user_frame(traceback.extract_stack())}: the captured "
        "graph would pass the hook by. Write what it does as a differentiable operation, or on param.grad after the step."
    )
