"""Refuse state from outside the graph that a trace would freeze: one trace's random numbers or gradients, used in every step.

Contract: while `refuse_outside_state` is open, taking a gradient within the forward (`torch.autograd.grad`,
`torch.func.grad`, whose results export detaches) and drawing random numbers from Python or NumPy raise `CaptureError`.
`refuse_draws` raises for the global generators of Python and NumPy and for generators that modules hold, `refuse_generators`
for a `torch.Generator` that is passed to an operator. Meanwhile `torch.distributions` do not check their arguments, as under
`torch.compile`.
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
def refuse_outside_state() -> Iterator[None]:
    """Raise `CaptureError` for gradients taken inside and, on closing, for draws from Python's or NumPy's generators."""
    with aot.backward_replaced(_no_backward), aot.distributions_unchecked(), refuse_draws():
        yield


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"a gradient is taken while the model runs, at {user_frame(traceback.extract_stack())}: torch.export would detach "
        "it, and what it adds to the parameters' gradients would be lost. Write the derivative as a formula, or train this "
        "part outside of the pipeline."
    )


@contextlib.contextmanager
def refuse_draws(*roots: Any) -> Iterator[None]:
    """Raise `CaptureError` on closing if a generator's state has changed, and restore all states.

    The generators are Python's and NumPy's global ones, and those in attributes of the modules under `roots`.
    """
    before = [(generator, generator.state()) for generator in _generators(roots)]
    drawn = []
    try:
        yield
        drawn = [generator.name for generator, state in before if not _equal_states(generator.state(), state)]
    finally:
        for generator, state in before:
            generator.restore(state)
    if drawn:
        raise CaptureError(
            f"the model or the loss draws random numbers from {' and '.join(drawn)}: the numbers drawn while the graph is "
            "captured would be used in every step. Draw them with torch, or outside, and pass them as an argument."
        )


@dataclass(frozen=True)
class _RandomState:
    """A generator of random numbers: its name in messages, and functions that read and set its state."""

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], object]


def _generators(roots: tuple[Any, ...]) -> Iterator[_RandomState]:
    yield _RandomState("Python's `random`", random.getstate, random.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _RandomState("`numpy.random`", numpy.get_state, numpy.set_state)
    for root in roots:
        for fqn, module in root.named_modules() if isinstance(root, nn.Module) else ():
            for key, value in vars(module).items():
                yield from _random_state_of(f"the generator {fqn}.{key}".replace(" .", " "), value, numpy)


def _random_state_of(name: str, value: Any, numpy: Any) -> Iterator[_RandomState]:
    """The generator in an attribute, if the attribute is one of Python or NumPy with a readable state."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield _RandomState(name, value.getstate, value.setstate)
    elif numpy is not None and isinstance(value, numpy.RandomState):
        yield _RandomState(name, value.get_state, value.set_state)
    elif numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        yield _RandomState(name, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _equal_states(now: Any, before: Any) -> bool:
    """True if two states, which are nested tuples or dicts of numbers and arrays, are equal."""
    if isinstance(now, dict):
        return all(_equal_states(now[key], value) for key, value in before.items())
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_equal_states, now, before))
    equal = now == before
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def refuse_generators(graph: fx.Graph) -> None:
    """Raise `CaptureError` if an operator of the graph draws from a generator that is passed to it."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            line = source_line(node.meta.get("stack_trace") or "") or "the loss"
            raise CaptureError(
                f"{node.target} at {line} draws from a torch.Generator of its own: its numbers would depend on how the model "
                "is split. Draw from the default generator (torch.manual_seed), or outside, and pass the numbers in."
            )
