"""Explain an error of a trace: torch's message, the user's source line, and a remedy.

Contract: inside `explain_errors` every exception becomes a `CaptureError`. A `GraphPPError` among the causes is raised as it
is. The remedy depends on the fault: a value of a tensor that steers Python, an implementation that a library chose by its
configuration and that does so (`_SWITCHES`), or code that fails on tensors without data.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from graphpp.capture.loss import runs_loss
from graphpp.capture.source_lines import source_line, user_frame
from graphpp.errors import CaptureError, GraphPPError

# An entry of a library's configuration that chooses among implementations of an operation -> the implementation that reads
# values of tensors in Python, and one that a trace accepts.
_SWITCHES = {"_experts_implementation": ("eager", "grouped_mm")}  # transformers 5: experts of a mixture

@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Raise a `GraphPPError` for every exception inside."""
    try:
        yield
    except Exception as error:
        raise _explain(error) from error


def _explain(error: Exception) -> GraphPPError:
    """The refusal among the causes, or a `CaptureError` with torch's message, the user's line and a remedy."""
    chain = list(causes(error))
    refusal = next((cause for cause in chain if isinstance(cause, GraphPPError)), None)
    if refusal is not None:
        return refusal
    message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    frames = (user_frame(traceback.extract_tb(cause.__traceback__)) or source_line(str(cause)) for cause in chain)
    place = next(filter(None, frames), "(no line of the model's own code)")
    by_value = any(word in f"{type(cause).__name__} {cause}" for cause in chain for word in _DATA_DEPENDENT)
    remedy = (_other_implementation(chain) or _BY_VALUE) if by_value else _BY_WRITE if _WRITES in str(error) else _BY_SHAPE
    subject = "loss" if any(map(runs_loss, chain)) else "model"
    return CaptureError(
        f"the {subject} cannot be captured as one graph: {type(error).__name__}: {message}\n  at {place}\n{remedy}"
    )


def _other_implementation(chain: list[BaseException]) -> str:
    """A remedy if code on the stack of an error chose an implementation of `_SWITCHES` by its configuration; else empty."""
    frames = (frame for cause in chain for frame, _ in traceback.walk_tb(cause.__traceback__))
    for frame in reversed(list(frames)):
        for entry, (chosen, other) in _SWITCHES.items():
            module = _first_argument(frame)
            config = getattr(module, "config", None)
            if entry in frame.f_code.co_names and getattr(config, entry, None) == chosen:
                return (
                    f"{type(module).__name__} loops over values of tensors because config.{entry} is {chosen!r}. Choose the "
                    f"implementation without a loop, before or after the model is made: config.{entry} = {other!r}."
                )
    return ""


def _first_argument(frame: FrameType) -> Any:
    """The first argument of a function that is running, which is `self` in a method; None without arguments."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors because of which it was raised, the latest first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


_DATA_DEPENDENT = ("ata-dependent", "DataDependent", "Could not guard", "memo disaster", "nbacked", "numpy", "item()")
_BY_VALUE = (
    "Values of tensors must not steer Python (if, while, int(), len(), .item(), numpy): write such a choice with torch.where "
    "or torch.cond, or compute it outside and pass it as an argument. If the line has no such choice, torch cannot trace its "
    "operation for a size that only the data decides: give the operation a known size, with padding or a mask."
)
_WRITES = "entirely functional graph"
_BY_WRITE = (
    "The code writes in place into a tensor that belongs neither to the model nor to the call, such as a buffer of a loss "
    "module: register the tensor as a buffer of the model, or compute the new value outside and pass it as an argument."
)
_BY_SHAPE = (
    "It was raised while model and loss ran on tensors with shapes but without data. Check that loss(model(...), target) "
    "runs eagerly on this microbatch; if it does, the line above uses what torch.export cannot trace."
)
