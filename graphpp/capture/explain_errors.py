"""Explain an error of a trace: torch's message, the user's source line, and a remedy.

Contract: inside `explain_errors` every exception becomes a `CaptureError`. A `GraphPPError` among the causes is raised
unchanged. The remedy distinguishes values of tensors that control Python, in-place writes, and code that fails on fake tensors.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence

from torch.nn import modules, utils

from graphpp._torch.tensor_subclass import WRITES
from graphpp.capture.loss import runs_loss
from graphpp.capture.source_lines import source_line, user_frame
from graphpp.errors import CaptureError, GraphPPError


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _explain(error) from error


def _explain(error: Exception) -> GraphPPError:
    chain = list(causes(error))
    refusal = next((cause for cause in chain if isinstance(cause, GraphPPError)), None)
    if refusal is not None:
        return refusal
    message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    frames = (user_frame(traceback.extract_tb(cause.__traceback__)) or source_line(str(cause)) for cause in chain)
    place = next(filter(None, frames), "(no line of the model's own code)")
    by_value = any(map(_asks_for_values, chain))
    by_write = any(words in str(error) for words in WRITES)
    remedy = _by_value(chain, place) if by_value else _BY_WRITE if by_write else _BY_SHAPE
    subject = "loss" if any(map(runs_loss, chain)) else "model"
    return CaptureError(
        f"the {subject} cannot be captured as one graph: {type(error).__name__}: {message}\n  at {place}\n{remedy}"
    )


def _by_value(chain: Sequence[BaseException], place: str) -> str:
    """The remedy for Python that asks for values, by the idiom that asks."""
    files = {frame.f_code.co_filename for cause in chain for frame, _ in traceback.walk_tb(cause.__traceback__)}
    if not files.isdisjoint(_RECURRENT):
        return _BY_PACKING
    if re.search(r"\bassert\b|_assert\(", place):
        return _BY_ASSERTION
    return f"{BY_VALUE} {_EXPERTS}" if "transformers" in place else BY_VALUE


def is_of_trace(error: BaseException) -> bool:
    """Whether only a trace raises such an error: a refusal, or a question for values that no tensor has under a trace."""
    return any(isinstance(cause, GraphPPError) or _asks_for_values(cause) for cause in causes(error))


def _asks_for_values(error: BaseException) -> bool:
    return any(word in f"{type(error).__name__} {error}" for word in _DATA_DEPENDENT)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, then its causes."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


_DATA_DEPENDENT = (
    *("ata-dependent", "DataDependent", "Could not guard", "memo disaster", "nbacked", "numpy", "item()"),
    *("Cannot access data pointer", "FakeTensor"),
)
BY_VALUE = (
    "Values of tensors must not steer Python (if, while, int(), len(), .item(), numpy): write such a choice with torch.where "
    "or torch.cond, or compute it outside and pass it as an argument. If the line has no such choice, torch cannot trace its "
    "operation for a size that only the data decides: give the operation a known size, with padding or a mask."
)
_RECURRENT = {modules.rnn.__file__, utils.rnn.__file__}  # which ask for values of packed sequences only
_BY_PACKING = (
    "A packed sequence has sizes that the lengths decide: run the recurrent layer on the padded batch. Its outputs are the "
    "same before each end: mask the others by torch.arange(steps) < lengths[:, None], and read the last ones by "
    "output[rows, lengths - 1]. The second direction of a bidirectional layer needs the rows reversed by their lengths."
)
_BY_ASSERTION = (
    "An assertion about values cannot be part of a captured graph: leave it out, or check the batch before the step. "
    "torch._assert_async(condition) may stay in the code; the graph does not check it."
)
_EXPERTS = "A mixture of transformers loops over experts unless config._experts_implementation = 'grouped_mm'."
_BY_WRITE = (
    "The code writes in place into a tensor that belongs neither to the model nor to the call, such as a plain attribute or a "
    "buffer of a loss module: write into a clone() of it, register the tensor as a buffer of the model, or compute the new "
    "value outside and pass it as an argument."
)
_BY_SHAPE = (
    "It was raised while model and loss ran on tensors with shapes but without data. Check that loss(model(...), target) "
    "runs eagerly on this microbatch; if it does, the line above uses what torch.export cannot trace."
)
