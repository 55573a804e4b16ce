"""Keep `nn.LSTM`, `nn.GRU` and `nn.RNN` whole in an exported graph.

Contract: within `whole_recurrences`, torch's recurrent functions call an operator that no trace decomposes into the operations
of each time step (`_torch/operators`). Layers with active dropout between them are called one by one: torch's decomposition
loses that dropout, because its condition on the layer's number is never true (torch 2.11 to 2.15). Packed sequences are left
to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphpp._torch.operators.recurrence import KINDS, OWNERS, recurrence
from graphpp._torch.this_thread import replaced


@contextlib.contextmanager
def whole_recurrences() -> Iterator[None]:
    """While open, the recurrent functions of torch are single operators in this thread."""
    with contextlib.ExitStack() as stack:
        for kind in KINDS:
            for owner in OWNERS:
                stack.enter_context(replaced(owner, kind, _whole(kind, getattr(torch, kind))))
        yield


def _whole(kind: str, original: Any) -> Any:
    names = [argument.name for argument in getattr(torch.ops.aten, kind).input._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.keys() != set(names) or isinstance(given["has_biases"], list | tuple):  # a packed sequence
            return original(*args, **kwargs)
        return _layers(kind, *(given[name] for name in names))

    return call


def _layers(kind: str, output: Tensor, hx: Any, params: Any, *options: Any) -> tuple[Tensor, ...]:
    """The last layer's output, then the final states of all layers."""
    biases, layers, dropout, *flags = options
    states, params = [hx] if isinstance(hx, Tensor) else list(hx), list(params)
    if not (flags[0] and dropout > 0 and layers > 1):
        return tuple(recurrence(kind, output, states, params, biases, layers, *flags))
    width, finals = len(params) // layers, []
    for layer, own in enumerate(zip(*(state.chunk(layers) for state in states), strict=True)):
        output = torch.dropout(output, dropout, True) if layer else output
        weights = params[layer * width : (layer + 1) * width]
        output, *ends = recurrence(kind, output, list(own), weights, biases, 1, *flags)
        finals.append(ends)
    return output, *(torch.cat(list(state)) for state in zip(*finals, strict=True))
