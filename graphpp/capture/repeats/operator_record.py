"""Note the operators that a forward runs, so that two forwards can be compared.

Contract: two records are equal if the forwards ran the same operators in the same order, below autograd, on the same tensors:
inputs, parameters and buffers by name, and tensors that the forward made by their number. Arguments that are no tensors are
compared by type and text; shapes, strides and dtypes of results, the need of a gradient of arguments, the grad mode, autocast
and a checkpoint of the forward's own count too. Of a custom autograd Function, whose forward is not recorded, the class and the
arguments count.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from graphpp._torch import aot, pytree
from graphpp.capture.activation_checkpoints import checkpointed_call_now
from graphpp.capture.autograd_functions import described_function

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)  # types that are equal if their texts are


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in (tuple, list) else type(value) in PLAIN


def _layout(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else repr(value)


def _autocast() -> Any:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


class OperatorRecord(aot.DispatchMode):
    """While active, notes the operators of this thread in `operators`; `named` has the tensors that the forward may read."""

    supports_higher_order_operators = True

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []
        self._checkpoint = checkpointed_call_now()
        self.strange: str | None = None  # an operator that cannot be compared
        self._names: dict[int, str] = {id(tensor): name for name, tensor in named.items()}
        self._made: list[weakref.ref[torch.Tensor]] = []  # weak: torch copies a tensor that somebody holds while it is made

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(operator, "namespace", "") == "prim":  # asks a tensor for its device
            return operator(*args, **kwargs)
        function = described_function(operator, args)
        if function is not None and not _is_plain(function[1:]):
            self.strange = "a custom autograd.Function with an argument that is no plain data"
        given = self._described((function or args, kwargs))
        results = operator(*args, **kwargs)
        if not isinstance(operator, aot.OperatorWithSchema):
            self.strange = f"the operator {operator}"
        leaves = pytree.tree_flatten(results)[0]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._names:
                self._names[id(leaf)] = f"made {len(self._made)}"
                self._made.append(weakref.ref(leaf, partial(self._forget, id(leaf))))
        autocast = _autocast() if function is not None else None  # casts of other operators are operators
        modes = torch.is_grad_enabled(), autocast, checkpointed_call_now() == self._checkpoint
        self.operators.append((operator, modes, given, [_layout(leaf) for leaf in leaves]))
        return results

    def name(self, tensor: torch.Tensor) -> str | None:
        """The name of an input or the number of a tensor that the forward made; None for any other tensor."""
        return self._names.get(id(tensor))

    def held(self) -> bool:
        """Whether a tensor that the forward made is still held."""
        return any(reference() is not None for reference in self._made)

    def _forget(self, number: int, _: Any) -> None:
        self._names.pop(number, None)  # another tensor may get the address

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = self.name(value)
            if name is None:
                self.strange = "a tensor that is neither an argument nor made by the forward"
            return name, value.requires_grad
        if isinstance(value, list | tuple):
            return [self._described(each) for each in value]
        if isinstance(value, dict):
            return {key: self._described(each) for key, each in value.items()}
        return type(value), repr(value)
