"""Refuse outside state that a trace would freeze: random numbers and gradients of one trace would be used in every step.

Contract: `CaptureError` is raised for a gradient taken within the forward, whose result export detaches; for draws from the
global generators of Python and NumPy and from generators of modules; for a `torch.Generator` passed to an operator; for random
numbers in the body of a higher-order operator. Other threads may draw and take gradients meanwhile.

Draws from a global generator are detected by replaced module functions and, while no other thread is alive, by the generator's
state. Only the state shows a draw by a function kept in an object (`self.draw = random.random`).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import fx, nn

from graphpp._torch import aot, autograd
from graphpp._torch.this_thread import found_in_modules, replaced
from graphpp.capture.source_lines import source_line, user_line
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.joint.key_dropout_and_random_ops import draws_random_numbers


@contextlib.contextmanager
def refuse_outside_state() -> Iterator[None]:
    """Raise `CaptureError` for gradients taken inside; `torch.distributions` skip checks, as under `torch.compile`."""
    with autograd.backward_replaced(_no_backward), aot.distributions_unchecked():
        yield


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"a gradient is taken while the model runs, at {user_line()}: torch.export would detach "
        "it, and what it adds to the parameters' gradients would be lost. Write the derivative as a formula, or train this "
        "part outside of the pipeline."
    )


@contextlib.contextmanager
def refuse_draws(*roots: Any) -> Iterator[None]:
    """Raise `CaptureError` for draws from the global generators of Python and NumPy, and from those of modules in `roots`."""
    generators = [*_global_generators(), *(state for root in roots for state in _generators_of(root))]
    names = {id(function): generator for generator, function in _global_draws()}
    with _refuse_changed_states(generators), contextlib.ExitStack() as stack:
        for module, key, function in found_in_modules(names):
            stack.enter_context(replaced(module, key, partial(_refuse_draw, names[id(function)])))
        yield


def _global_draws() -> Iterator[tuple[str, Any]]:
    """Pairs of a global generator's name and a module function that draws from it."""
    modules: list[tuple[str, Any]] = [(_PYTHON, random), (_NUMPY, sys.modules.get("numpy.random"))]
    for generator, module in modules:
        for key, function in vars(module).items() if module is not None else ():
            if getattr(function, "__self__", None) is module.random.__self__ and key not in _STATES:
                yield generator, function


def _refuse_draw(generator: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise _frozen_draws(f"{generator} at {user_line()}")


def _frozen_draws(generators: str) -> CaptureError:
    return CaptureError(
        f"the model or the loss draws random numbers from {generators}: the numbers drawn while the graph is captured would be "
        "used in every step. Draw them with torch, or outside, and pass them as an argument."
    )


@contextlib.contextmanager
def _refuse_changed_states(generators: Sequence[_RandomState]) -> Iterator[None]:
    """Raise `CaptureError` for changed states, and restore them; skips global generators if other threads may have drawn."""
    before = [(generator, generator.state()) for generator in generators]
    several = threading.active_count() > 1
    drawn: list[str] = []
    try:
        yield
    finally:
        left_out = _GLOBAL if several or threading.active_count() > 1 else ()
        for generator, state in before:
            if generator.name not in left_out and not _equal_states(generator.state(), state):
                drawn.append(generator.name)
                generator.restore(state)
    if drawn:
        raise _frozen_draws(" and ".join(drawn))


_GLOBAL = _PYTHON, _NUMPY = "Python's `random`", "`numpy.random`"
_STATES = ("getstate", "setstate", "get_state", "set_state")


@dataclass(frozen=True)
class _RandomState:
    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], object]


def _global_generators() -> Iterator[_RandomState]:
    yield _RandomState(_PYTHON, random.getstate, _set_python_state)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _RandomState(_NUMPY, numpy.get_state, numpy.set_state)


def _set_python_state(state: Any) -> None:
    random.setstate(state)  # must name `setstate`, see `_unless_by_dynamo` in export_thread.py


def _generators_of(root: Any) -> Iterator[_RandomState]:
    numpy = sys.modules.get("numpy.random")
    for fqn, module in root.named_modules() if isinstance(root, nn.Module) else ():
        for key, value in vars(module).items():
            yield from _random_state_of(f"the generator {fqn}.{key}".replace(" .", " "), value, numpy)


def _random_state_of(name: str, value: Any, numpy: Any) -> Iterator[_RandomState]:
    """The generator in an attribute, if it is one of Python or NumPy with a readable state."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        yield _RandomState(name, value.getstate, value.setstate)
    elif numpy is not None and isinstance(value, numpy.RandomState):
        yield _RandomState(name, value.get_state, value.set_state)
    elif numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        yield _RandomState(name, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _equal_states(now: Any, before: Any) -> bool:
    """Whether two states (nested tuples or dicts of numbers and arrays) are equal."""
    if isinstance(now, dict):
        return all(_equal_states(now[key], value) for key, value in before.items())
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_equal_states, now, before))
    equal = now == before
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def refuse_random_bodies(joint: JointGraph) -> None:
    """Raise `CaptureError` if the body of a higher-order operator draws: the draws would have no key of the microbatch."""
    for node in joint.graph.find_nodes(op="get_attr"):
        body = node.meta.get("held")
        if isinstance(body, fx.GraphModule) and _draws(body):
            operator = next(iter(node.users), node)
            raise CaptureError(
                f"{operator.target} at {operator.meta['source'] or 'the loss'} draws random numbers in its body: they would "
                "depend on how the model is split. Draw them outside of the body, and pass them to the operator."
            )


def _draws(body: fx.GraphModule) -> bool:
    graphs = [module.graph for module in body.modules() if isinstance(module, fx.GraphModule)]
    return any(draws_random_numbers(node.target, node.args, node.kwargs) for graph in graphs for node in graph.nodes)


def refuse_generators(graph: fx.Graph) -> None:
    """Raise `CaptureError` if an operator draws from a generator passed to it."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            line = source_line(node.meta.get("stack_trace") or "") or "the loss"
            raise CaptureError(
                f"{node.target} at {line} draws from a torch.Generator of its own: its numbers would depend on how the model "
                "is split. Draw from the default generator (torch.manual_seed), or outside, and pass the numbers in."
            )
