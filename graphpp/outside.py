"""What a trace takes from outside its graph: refused, or kept out, so that no number of one trace is used in every step.

Contract: while `sealed` is open, `CaptureError` is raised for gradients taken within the forward (`torch.autograd.grad`,
`torch.func.grad`: export detaches their results) and for random numbers of Python or NumPy; `refuse_generators` does so for
random numbers of a `torch.Generator` of the model's own. `torch.distributions` check no values, as under `torch.compile`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import fx

from graphpp import _torch_aot as aot
from graphpp.errors import CaptureError
from graphpp.lines import source_line, user_frame


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Watch a trace for what it takes from outside."""
    with aot.backward_replaced(_no_backward), aot.distributions_unchecked(), _no_draws():
        yield


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"a gradient is taken while the model runs, at {user_frame(traceback.extract_stack())}: torch.export would detach "
        "it, and what it adds to the parameters' gradients would be lost. Write the derivative as a formula, or train this "
        "part outside of the pipeline."
    )


@contextlib.contextmanager
def _no_draws() -> Iterator[None]:
    """Raise if Python's or NumPy's global generator has moved; both are as before afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy else None
    drawn = []
    try:
        yield
        drawn += ["Python's `random`"] if random.getstate() != python else []
        drawn += ["`numpy.random`"] if numpy and _moved(numpy.get_state(), state) else []
    finally:
        random.setstate(python)
        if numpy:
            numpy.set_state(state)
    if drawn:
        raise CaptureError(
            f"the model or the loss draws random numbers from {' and '.join(drawn)}: the numbers drawn while the graph is "
            "captured would be used in every step. Draw them with torch, or outside, and pass them as an argument."
        )


def _moved(now: Any, before: Any) -> bool:
    """Whether two states of a NumPy generator, (name, key, position, ...), differ."""
    return bool(now[2] != before[2] or (now[1] != before[1]).any())


def refuse_generators(graph: fx.Graph) -> None:
    """Refuse operators that draw from a generator that is passed to them."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            line = source_line(node.meta.get("stack_trace") or "") or "the loss"
            raise CaptureError(
                f"{node.target} at {line} draws from a torch.Generator of its own: its numbers would depend on how the model "
                "is split. Draw from the default generator (torch.manual_seed), or outside, and pass the numbers in."
            )
