"""Tracing without the work of torch's tracers of which a capture reads no result.

Checked on torch 2.13.0 and 2.15.0:

- `torch.fx.graph._PyTreeCodeGen`, `torch.fx.Graph._codegen`, `torch.fx.GraphModule`: `_in_spec`, `_out_spec`, `_code`: what a
  module has of its graph's code; the class of a module is its own, and `recompile` gives it a `forward`
- `torch.fx._lazy_graph_module._LazyGraphModule`: torch's own modules that make their code later
- `torch.utils._traceback._extract_symbolized_tb`: the stack of Python frames that a tracer notes on a node

A module whose graph changed in the context makes its code when it is called or when its code is read, also after the context.
Within the context such a module cannot be pickled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import FrameSummary, StackSummary
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _traceback

from graphpp._torch import aot
from graphpp._torch.this_thread import replaced


@contextlib.contextmanager
def tracing_quickly() -> Iterator[None]:
    """The context `aot.quick`, in which torch's tracers too leave out work of which nobody reads the result."""
    with aot.quick(), _code_when_called(), _frames_read_once():
        yield


def _code_when_called() -> contextlib.AbstractContextManager[None]:
    """A context in which the modules of changed graphs, torch's and ours, make their Python code when they are called.

    Export changes the graph of a model many times, and writes code of thousands of lines each time that nothing runs.
    """
    compiled: Callable[..., Any] = fx.GraphModule.recompile

    def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiled(module)  # puts another `forward` in the place of this one
        return module.forward(*args, **kwargs)

    def recompile(module: fx.GraphModule) -> Any:
        if isinstance(module, _LazyGraphModule):  # its code is asked for now
            return compiled(module)
        codegen, kind = module.graph._codegen, type(module)  # a class of this module alone
        if isinstance(codegen, _PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        vars(module).pop("_code", None)
        kind.forward, kind._code = forward, _Code(compiled)
        return None

    return replaced(fx.GraphModule, "recompile", recompile)


def _frames_read_once() -> contextlib.AbstractContextManager[None]:
    """A context in which a tracer reads the source of each line on its stack once, not once for each node that it makes."""

    @functools.cache
    def frame(filename: str, line: int, name: str) -> FrameSummary:
        return FrameSummary(filename, line, name)

    def summary(symbolized: Sequence[Mapping[str, Any]], skip: int) -> StackSummary:
        return StackSummary([frame(each["filename"], each["line"], each["name"]) for each in reversed(symbolized[skip:])])

    return replaced(_traceback, "_extract_symbolized_tb", summary)


class _Code:
    """The Python code of a module, made when it is read; the module's own attribute hides this one from then on."""

    def __init__(self, compiled: Callable[[fx.GraphModule], Any]) -> None:
        self._compiled = compiled

    def __get__(self, module: fx.GraphModule | None, owner: type) -> Any:
        if module is None:
            return self
        self._compiled(module)
        return vars(module)["_code"]
