"""What a trace would lose without a word, and so make gradients wrong: refused before or while the model is traced.

Contract: `check_model` and, while `refusing` is open, tracing itself raise `CaptureError` with the FQN or the user's line for

- hooks on gradients, of parameters or of values in the forward: the graph's gradients would pass them by;
- a number or a size that only the data decides (no wrong gradient, but torch's own word for it helps nobody);
- two parameters in one memory (tied by `.data`): ranks would each train a copy;
- TorchScript modules, which export cannot trace.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction

from graphpp.errors import CaptureError
from graphpp.lines import source_line, user_frame


def check_model(model: nn.Module) -> None:
    """Refuse what is wrong about the parameters before anything is traced."""
    _refuse_scripted(model)
    _refuse_hooks(model)
    _refuse_shared_memory(model)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Refuse what the forward does that a trace would lose; flatten what is checkpointed by a Function of torch's."""
    flattened = staticmethod(_flattened)
    with _patched(CheckpointFunction, "apply", flattened), _patched(torch.Tensor, "register_hook", _hooked):
        yield


def _refuse_scripted(model: nn.Module) -> None:
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{f'the module {fqn}' if fqn else 'the model'} is a TorchScript module, which torch.export cannot trace: "
                "use the module that it was made from."
            )


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


def refuse_unknown_numbers(graph: fx.Graph, loss: Any) -> None:
    """Refuse numbers and sizes that only the data decides: `.item()`, `nonzero`, indexing with a mask.

    The trace knows the lines of forwards; what has none stands in the loss or in a function that it or a forward calls.
    """
    code = getattr(loss, "__code__", None)
    outside = f"the loss ({code.co_filename}:{code.co_firstlineno})" if code is not None else "the loss"
    for node in graph.nodes:
        value, line = node.meta.get("val"), source_line(node.meta.get("stack_trace") or "")
        numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers):
            raise CaptureError(
                "a number or a size that only the data decides is used at "
                f"{line or outside}, by {node.target}: a captured graph has one set of shapes. Write "
                ".item(), nonzero() or indexing with a mask as tensor operations (torch.where, multiplication with the "
                "mask), or compute it outside and pass it in."
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


def _flattened(function: Any, keep_random_state: bool, *args: Any) -> Any:
    """A checkpointed function run as if it was not: the same numbers, and no gradient where eager has none."""
    reached = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with contextlib.nullcontext() if reached else torch.no_grad():
        return function(*args)


def _hooked(tensor: torch.Tensor, hook: Any) -> NoReturn:
    raise CaptureError(
        f"the forward hooks a gradient with Tensor.register_hook at {user_frame(traceback.extract_stack())}: the captured "
        "graph would pass the hook by. Write what it does as a differentiable operation, or on param.grad after the step."
    )
