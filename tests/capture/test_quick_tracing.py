"""Graph modules that change while a capture traces run, copy and print as their graphs say, then and later."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import fx

from graphpp._torch.quick_tracing import tracing_quickly

X = torch.arange(3.0)


def doubled() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x * 2)


def changed(module: fx.GraphModule) -> fx.GraphModule:
    """The module, whose graph is changed from x * 2 to x + 2."""
    node = next(node for node in module.graph.nodes if node.target is operator.mul)
    node.target = operator.add
    module.recompile()
    return module


@pytest.fixture(params=["within", "afterwards"])
def module(request: pytest.FixtureRequest) -> Iterator[fx.GraphModule]:
    """The changed module, within the context and after it."""
    made = doubled()
    with ExitStack() as stack:
        stack.enter_context(tracing_quickly())
        changed(made)
        if request.param == "afterwards":
            stack.close()
        yield made


def test_a_changed_module_runs_as_its_graph_says(module: fx.GraphModule) -> None:
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(X), X + 2) and torch.equal(module.forward(X), X + 2)
    assert seen == [1]  # the first call, which makes the code, is one call


def test_the_lines_on_a_stack_are_those_of_python() -> None:
    with tracing_quickly():
        found = torch.utils._traceback.CapturedTraceback.extract().summary()  # type: ignore[attr-defined]
    frames = [frame for frame in found if frame.filename == __file__]
    own = [frame for frame in traceback.extract_stack() if frame.filename == __file__]
    assert [frame.name for frame in frames] == [frame.name for frame in own]
    assert "CapturedTraceback.extract()" in str(frames[-1].line)
