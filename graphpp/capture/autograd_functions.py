"""Capture a custom `autograd.Function` with its own backward.

Contract
--------
- `torch.export` traces the forward of a Function and drops its backward. While `record_functions` is open, each applied
  Function becomes one operator call in the exported graph. `restore_into` replaces this call by `apply` itself, whose forward
  and backward AOT Autograd traces.
- `CaptureError` is raised for a Function that writes the model's state or adds to a gradient, which no trace records, and for a
  Function inside a higher-order operator such as `torch.cond`, where torch loses the Function's backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import autograd, pytree
from graphpp._torch.tensor_subclass import dispatches
from graphpp.capture.source_lines import user_line
from graphpp.errors import CaptureError

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_LIBRARY.define("function(Tensor[] tensors, int number) -> Tensor[]")
_OPERATOR = torch.ops.graphpp.function.default


@dataclass
class FunctionCall:
    """One `apply` in the forward: the Function, its flattened arguments, the user's line and its results (once known)."""

    function: type
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    place: str
    returned: Any = None

    def run(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Apply the Function to `tensors` in place of the recorded tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if _is_traced(leaf) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


@dataclass
class FunctionCalls:
    """The custom Functions that one forward applied, in order. `within`: the context in which their own forwards run.

    `evaluates`: the forward is captured without gradients. Its Functions are recorded, too, since torch cannot trace their
    forwards under an export if they compute with a tensor class of their own (`Float8TrainingTensor` of torchao).
    """

    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    evaluates: bool = field(default_factory=lambda: not torch.is_grad_enabled())
    applied: list[FunctionCall] = field(default_factory=list)
    _inside: bool = False
    _grad_enabled: bool = True
    _applying: type | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Open during a Function's own forward: Functions that it applies are not recorded."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def on_apply(self, function: type) -> None:
        """Note the Function and the grad mode. Raises `CaptureError` in a sub-graph of a higher-order operator."""
        self._grad_enabled = torch.is_grad_enabled()
        self._applying = function
        if function.__name__ == autograd.FUNCTION_OF_A_REGION:
            raise _lost_backward("a custom autograd.Function", user_line())

    def forward(self, function: type, own: Callable[..., Any]) -> Callable[..., Any]:
        """The forward that `apply` runs: one that records the call, or `own`, as without gradients."""
        is_applied, self._applying = self._applying is function, None
        kept = function.__module__.startswith(autograd.KEPT_FUNCTIONS)
        without = not (self._grad_enabled or self.evaluates)  # a part of a training's forward
        if not is_applied or without or self._inside or kept or autograd.dynamo_is_reading():
            return own
        with_context = function.setup_context is torch.autograd.Function.setup_context  # type: ignore[attr-defined]

        @wraps(own)
        def record(*args: Any, **kwargs: Any) -> Any:
            tensors = any(map(_is_traced, pytree.tree_flatten((args, kwargs))[0]))
            arguments = args[1:] if with_context else args
            return self._record(function, arguments, kwargs) if tensors else own(*args, **kwargs)

        return record

    def _record(self, function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator in place of a Function; returns the Function's results with the operator's tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = FunctionCall(function, leaves, spec, user_line())
        self.applied.append(call)
        results = iter(_OPERATOR(list(filter(_is_traced, leaves)), len(self.applied) - 1))
        return pytree.tree_map(lambda leaf: next(results) if isinstance(leaf, torch.Tensor) else leaf, call.returned)

    def restore_into(self, module: fx.GraphModule) -> None:
        """Replace the operators by `apply`, in place. Raises `CaptureError` for a Function inside a higher-order operator."""
        found = set[int]()
        for node in module.graph.find_nodes(op="call_function", target=_OPERATOR):
            number = int(node.args[1])
            found.add(number)
            name = f"function_{number}"
            module.add_submodule(name, FunctionModule(self.applied[number]))
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
        """Raise `CaptureError` if a Function wrote into the model's (new, fake) tensors or added to a gradient."""
        state = [*model.named_parameters(), *model.named_buffers()]
        names = ", ".join(dict.fromkeys(f"{call.function.__qualname__} at {call.place}" for call in self.applied))
        for fqn, tensor in state if self.applied else ():
            effect = "adds to the gradient of" if tensor.grad is not None else "writes into" if tensor._version else ""
            if effect:
                raise CaptureError(
                    f"a custom autograd.Function ({names}) {effect} {fqn}, which is not among its arguments: the captured "
                    f"graph would do without it. Pass {fqn} to the Function and return its gradient, or its new value."
                )


def _is_traced(leaf: Any) -> bool:
    """Whether an argument is a tensor of the trace; one whose class computes itself is not (`tensor_objects.py`)."""
    return isinstance(leaf, torch.Tensor) and not dispatches(type(leaf))


def _lost_backward(function: str, place: str) -> CaptureError:
    return CaptureError(
        f"{function} is applied at {place} inside a region that is one operator in the graph (a branch of torch.cond, a loop): "
        "its backward would be lost there. Apply it outside of the region."
    )


class FunctionModule(nn.Module):
    """A recorded `apply` as a module of the exported graph; returns the tensors of the Function's results."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self._call = call

    @property
    def computes(self) -> Hashable:
        """A key that calls share which compute the same from their tensors."""
        given = (() if _is_traced(leaf) else repr(leaf) for leaf in self._call.leaves)
        return self._call.function, repr(self._call.spec), tuple(given)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = pytree.tree_flatten(self._call.run(tensors))[0]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_current: ContextVar[FunctionCalls] = ContextVar("functions of the capture that is running")


@contextlib.contextmanager
def record_functions(functions: FunctionCalls) -> Iterator[None]:
    """While open, record applied Functions in `functions`, and trace an operator in their place."""
    token = _current.set(functions)
    try:
        with autograd.functions_watched(functions.on_apply, functions.forward):
            yield
    finally:
        _current.reset(token)


def _fake(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The operator's fake results, from the Function's own forward on fake tensors."""
    functions = _current.get()
    call = functions.applied[number]
    with torch.no_grad(), autograd.as_outside_kernels(), functions.inside(), functions.within():
        call.returned = call.run(tensors)
    leaves = pytree.tree_flatten(call.returned)[0]
    results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results]


torch.library.register_fake("graphpp::function", _fake, lib=_LIBRARY)
