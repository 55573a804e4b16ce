"""Capture a custom `autograd.Function` with its own backward.

Contract
--------
- `torch.export` traces through the forward of a Function and drops its backward. While `record_functions` is open, each
  applied Function becomes one operator call in the exported graph, under whatever name the model holds its `apply`.
  `restore_into` replaces that operator by the `apply` itself. AOT Autograd, which runs real autograd on fake tensors, then
  traces the Function's own forward and backward.
- No trace sees the side effects of a Function: a gradient that its backward adds to a parameter by itself, a write into a
  buffer or parameter that is not among its arguments. `refuse_side_effects` raises for both. `restore_into` raises for a
  Function inside a sub-graph of a higher-order operator such as `torch.cond`, where torch loses the Function's backward.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import aot
from graphpp.capture.source_lines import user_frame
from graphpp.errors import CaptureError

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # the module may be loaded twice in a process
_LIBRARY.define("function(Tensor[] tensors, int number) -> Tensor[]")
_OPERATOR = torch.ops.graphpp.function.default


@dataclass
class FunctionCall:
    """One `apply` in the forward: the Function, its arguments taken apart, and, once it is known, what it returned."""

    function: type
    leaves: Sequence[Any]
    spec: aot.TreeSpec
    place: str
    grad_enabled: bool
    returned: Any = None

    def run(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Apply the Function to these tensors in place of its own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = aot.tree_unflatten(leaves, self.spec)
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


@dataclass
class FunctionCalls:
    """The Functions that one forward applied, in order."""

    applied: list[FunctionCall] = field(default_factory=list)
    _inside: bool = False
    _grad_enabled: bool = True
    _begun: type | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While the forward of one Function runs: others that it applies are a part of it."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def on_apply(self, function: type) -> None:
        """A Function is about to run: `apply` switches autograd off for its forward."""
        self._grad_enabled = torch.is_grad_enabled()
        self._begun = function
        if function.__name__ == aot.FUNCTION_OF_A_REGION:
            raise _lost_backward("a custom autograd.Function", user_frame(traceback.extract_stack()))

    def forward(self, function: type, own: Callable[..., Any]) -> Callable[..., Any]:
        """The forward to run in place of a Function's own."""
        applied, self._begun = self._begun is function, None
        if not applied or self._inside or function.__module__.startswith(aot.KEPT_FUNCTIONS) or aot.dynamo_is_reading():
            return own
        with_context = function.setup_context is torch.autograd.Function.setup_context  # type: ignore[attr-defined]

        @wraps(own)
        def record(*args: Any, **kwargs: Any) -> Any:
            tensors = any(isinstance(leaf, torch.Tensor) for leaf in aot.tree_flatten((args, kwargs))[0])
            given = args[1:] if with_context else args
            return self._record(function, given, kwargs) if tensors else own(*args, **kwargs)

        return record

    def _record(self, function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator in place of a Function; what it returned, with the operator's results as its tensors."""
        leaves, spec = aot.tree_flatten((args, kwargs))
        call = FunctionCall(function, leaves, spec, user_frame(traceback.extract_stack()), self._grad_enabled)
        self.applied.append(call)
        results = iter(_OPERATOR([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], len(self.applied) - 1))
        return aot.tree_map(lambda leaf: next(results) if isinstance(leaf, torch.Tensor) else leaf, call.returned)

    def restore_into(self, module: fx.GraphModule) -> None:
        """Put the Functions in the place of their operators, in place; raises `CaptureError` where one has none."""
        found = set[int]()
        for node in module.graph.find_nodes(op="call_function", target=_OPERATOR):
            number = int(node.args[1])
            found.add(number)
            name = f"function_{number}"
            module.add_submodule(name, _FunctionModule(self.applied[number]))
            with module.graph.inserting_before(node):
                call = module.graph.call_module(name, (node.args[0],))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)
        lost = set(range(len(self.applied))) - found
        if lost:
            first = self.applied[min(lost)]
            raise _lost_backward(f"the custom autograd.Function {first.function.__qualname__}", first.place)

    def refuse_side_effects(self, model: nn.Module) -> None:
        """Raise `CaptureError` where a Function wrote into the model's state or added to a gradient by itself.

        The model holds tensors made for this capture: whoever writes into one raises its version.
        """
        state = [*model.named_parameters(), *model.named_buffers()]
        names = ", ".join(dict.fromkeys(map(self._named, range(len(self.applied)))))
        for fqn, tensor in state if self.applied else ():
            what = "adds to the gradient of" if tensor.grad is not None else "writes into" if tensor._version else ""
            if what:
                raise CaptureError(
                    f"a custom autograd.Function ({names}) {what} {fqn}, which is not among its arguments: the captured graph "
                    f"would do without it. Pass {fqn} to the Function and return its gradient, or its new value."
                )

    def _named(self, number: Any) -> str:
        call = self.applied[number]
        return f"{call.function.__qualname__} at {call.place}"


def _lost_backward(what: str, place: str) -> CaptureError:
    """The error for a Function that the exported graph has swallowed."""
    return CaptureError(
        f"{what} is applied at {place} inside a region that is one operator in the graph (a branch of torch.cond, a loop): its "
        "backward would be lost there. Apply it outside of the region."
    )


class _FunctionModule(nn.Module):
    """An `apply` as a module of the exported graph; returns the tensors among its results."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self._call = call

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(self._call.grad_enabled):
            leaves = aot.tree_flatten(self._call.run(tensors))[0]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_current: ContextVar[FunctionCalls] = ContextVar("functions of the capture that is running")


@contextlib.contextmanager
def record_functions(functions: FunctionCalls) -> Iterator[None]:
    """While open, every Function that is applied is recorded here, and the operator stands for it."""
    token = _current.set(functions)
    try:
        with aot.functions_watched(functions.on_apply, functions.forward):
            yield
    finally:
        _current.reset(token)


def _fake(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The shapes of the results: the Function's own forward on tensors without data."""
    functions = _current.get()
    call = functions.applied[number]
    with torch.no_grad(), functions.inside():
        call.returned = call.run(tensors)
    leaves = aot.tree_flatten(call.returned)[0]
    results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results]


torch.library.register_fake("graphpp::function", _fake, lib=_LIBRARY)
