"""What a trace takes from outside its graph: refused, or kept out, so that no number of one trace is used in every step.

Contract: while `sealed` is open, `CaptureError` is raised for gradients taken within the forward (`torch.autograd.grad`,
`torch.func.grad`: export detaches their results) and for random numbers of Python or NumPy; `no_draws` does so for these and
for generators of Python and NumPy that modules hold, `refuse_generators` for a `torch.Generator` of the model's own.
`torch.distributions` check no values, as under `torch.compile`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx, nn

from graphpp._torch import aot
from graphpp.capture.source_lines import source_line, user_frame
from graphpp.errors import CaptureError


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Watch a trace for what it takes from outside."""
    with aot.backward_replaced(_no_backward), aot.distributions_unchecked(), no_draws():
        yield


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"a gradient is taken while the model runs, at {user_frame(traceback.extract_stack())}: torch.export would detach "
        "it, and what it adds to the parameters' gradients would be lost. Write the derivative as a formula, or train this "
        "part outside of the pipeline."
    )


@contextlib.contextmanager
def no_draws(*roots: Any) -> Iterator[None]:
    """Raise if a generator has moved: Python's and NumPy's global ones, or one that a module under `roots` holds.

    All are as before afterwards.
    """
    before = [(generator, generator.state()) for generator in _generators(roots)]
    drawn = []
    try:
        yield
        drawn = [generator.name for generator, state in before if not _same(generator.state(), state)]
    finally:
        for generator, state in before:
            generator.restore(state)
    if drawn:
        raise CaptureError(
            f"the model or the loss draws random numbers from {' and '.join(drawn)}: the numbers drawn while the graph is "
            "captured would be used in every step. Draw them with torch, or outside, and pass them as an argument."
        )


@dataclass(frozen=True)
class _Generator:
    """A generator of random numbers: what messages call it, and how its state is read and set."""

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], object]


def _generators(roots: tuple[Any, ...]) -> Iterator[_Generator]:
    yield _Generator("Python's `random`", random.getstate, random.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _Generator("`numpy.random`", numpy.get_state, numpy.set_state)
    for root in roots:
        for fqn, module in root.named_modules() if isinstance(root, nn.Module) else ():
            for key, value in vars(module).items():
                yield from _held(f"the generator {fqn}.{key}".replace(" .", " "), value, numpy)


def _held(name: str, value: Any, numpy: Any) -> Iterator[_Generator]:
    """The generator that an attribute is, if it is one whose state can be read."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield _Generator(name, value.getstate, value.setstate)
    elif numpy is not None and isinstance(value, numpy.RandomState):
        yield _Generator(name, value.get_state, value.set_state)
    elif numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        yield _Generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _same(now: Any, before: Any) -> bool:
    """Whether two states, tuples or dicts of numbers and arrays, are equal."""
    if isinstance(now, dict):
        return all(_same(now[key], value) for key, value in before.items())
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    equal = now == before
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def refuse_generators(graph: fx.Graph) -> None:
    """Refuse operators that draw from a generator that is passed to them."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            line = source_line(node.meta.get("stack_trace") or "") or "the loss"
            raise CaptureError(
                f"{node.target} at {line} draws from a torch.Generator of its own: its numbers would depend on how the model "
                "is split. Draw from the default generator (torch.manual_seed), or outside, and pass the numbers in."
            )
