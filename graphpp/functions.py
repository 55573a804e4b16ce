"""Custom `autograd.Function`s: captured with their own backward.

Contract
--------
- `torch.export` traces through the forward of a Function and drops its backward. While `keeping` is open, each `apply`
  becomes one operator call in the exported graph; `restored` puts the `apply` itself in its place, so that AOT Autograd,
  which runs real autograd on fake tensors, traces the Function's own forward and backward.
- What a Function does beside its arguments and results cannot be seen by any trace: a gradient that its backward adds to a
  parameter by itself, a write into a buffer or parameter that it was not given. `check_seclusion` raises for those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphpp import _torch_aot as aot
from graphpp.errors import CaptureError

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # the module may be loaded twice in a process
_LIBRARY.define("function(Tensor[] tensors, int number) -> Tensor[]")
_OPERATOR = torch.ops.graphpp.function.default

_APPLY = torch.autograd.Function.__dict__["apply"]


def _apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """`function.apply` of torch itself, also while it is patched."""
    return _APPLY.__get__(None, function)(*args, **kwargs)


@dataclass
class Applied:
    """One `apply` in the forward: the Function, its arguments taken apart, and, once it is known, what it returned."""

    function: type
    leaves: Sequence[Any]
    spec: aot.TreeSpec
    place: str
    returned: Any = None

    def run(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Apply the Function to these tensors in place of its own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = aot.tree_unflatten(leaves, self.spec)
        return _apply(self.function, *args, **kwargs)


@dataclass
class Functions:
    """The Functions that one forward applied, in order."""

    applied: list[Applied] = field(default_factory=list)
    _inside: bool = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While the forward of one Function runs: others that it applies are a part of it."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def apply(self, function: type, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Any:
        """Record one `apply` as a single operator; what it returned, with the operator's results as its tensors."""
        leaves, spec = aot.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or self._inside:
            return _apply(function, *args, **kwargs)
        self.applied.append(call := Applied(function, leaves, spec, place))
        results = iter(_OPERATOR(tensors, len(self.applied) - 1))
        return aot.tree_map(lambda leaf: next(results) if isinstance(leaf, torch.Tensor) else leaf, call.returned)

    def restored(self, module: fx.GraphModule) -> None:
        """Put the Functions in the place of their operators, in place; raises `CaptureError` where one has none."""
        found = set[int]()
        for node in module.graph.find_nodes(op="call_function", target=_OPERATOR):
            number = int(node.args[1])
            found.add(number)
            name = f"function_{number}"
            module.add_submodule(name, _Module(self.applied[number]))
            with module.graph.inserting_before(node):
                call = module.graph.call_module(name, (node.args[0],))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)
        lost = set(range(len(self.applied))) - found
        if lost:
            first = self.applied[min(lost)]
            raise refused_in_region(f"the custom autograd.Function {first.function.__qualname__}", first.place)

    def check_seclusion(self, model: nn.Module) -> None:
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


def refused_in_region(what: str, place: str) -> CaptureError:
    """The error for a Function that the exported graph has swallowed."""
    return CaptureError(
        f"{what} is applied at {place} inside a region that is one operator in the graph (a branch of torch.cond, a loop): its "
        "backward would be lost there. Apply it outside of the region."
    )


class _Module(nn.Module):
    """An `apply` as a module of the exported graph; returns the tensors among its results."""

    def __init__(self, call: Applied) -> None:
        super().__init__()
        self._call = call

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = aot.tree_flatten(self._call.run(tensors))[0]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_current: ContextVar[Functions] = ContextVar("functions of the capture that is running")


@contextlib.contextmanager
def keeping(functions: Functions) -> Iterator[None]:
    """While open, the operator stands for the Functions recorded here."""
    token = _current.set(functions)
    try:
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
