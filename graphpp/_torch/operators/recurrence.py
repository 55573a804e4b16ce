"""`nn.GRU`, `nn.LSTM` and `nn.RNN` as one operator of a graph, whose size does not grow with the number of time steps.

Contract: `recurrence(kind, ...)` gives the results of torch's operator `kind`, by torch's own kernel. Its backward reads its
operands alone: it computes the forward again.

Checked on torch 2.13.0 and 2.15.0:

- `torch._VF`: the functions that recurrent modules call
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpp._torch.autograd import as_outside_kernels

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_OPERANDS = "Tensor input, Tensor[] states, Tensor[] params"
_OPTIONS = "str kind, bool biases, int layers, bool train, bool both, bool batch_first, ScalarType? autocast"
_LIBRARY.define(f"recurrence({_OPERANDS}, {_OPTIONS}) -> Tensor[]")
_LIBRARY.define(f"recurrence_backward({_OPERANDS}, Tensor[] grads, bool[] given, bool[] needed, {_OPTIONS}) -> Tensor[]")
FORWARD, BACKWARD = torch.ops.graphpp.recurrence, torch.ops.graphpp.recurrence_backward
OWNERS = (torch, torch._VF)  # the modules with functions of these kinds
KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
Tensors = Sequence[Tensor]


def recurrence(kind: str, input: Tensor, states: Tensors, params: Tensors, *options: Any) -> list[Tensor]:
    """The results of `torch.ops.aten.<kind>.input` without dropout, under the caller's autocast.

    `options`: biases, number of layers, training, both directions, batch first.
    """
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    results: list[Tensor] = FORWARD(input, states, params, kind, *options, autocast)
    return results


def forward_flops(input: Tensor, states: Tensors, params: Tensors, *rest: Any) -> Any:
    """FLOPs of the matrix products in a forward; the backward does three times as many."""
    return 2 * input.shape[0] * input.shape[1] * sum(each.numel() for each in params if each.dim() == 2)


@contextlib.contextmanager
def _as_outside(autocast: torch.dtype | None, device: str) -> Iterator[None]:
    """Admit in a kernel the dispatch keys of autograd, under which torch decomposes a recurrence, and autocast."""
    mode = torch.autocast(device, autocast) if autocast is not None else contextlib.nullcontext()
    with as_outside_kernels(), mode:
        yield


def _by_torch(input: Tensor, states: Tensors, params: Tensors, kind: str, *options: Any) -> tuple[Tensor, ...]:
    biases, layers, train, both, batch_first, autocast = options
    hx = list(states) if kind == "lstm" else states[0]
    operator = getattr(torch.ops.aten, kind).input
    with _as_outside(autocast, input.device.type):
        results: tuple[Tensor, ...] = operator(input, hx, params, biases, layers, 0.0, train, both, batch_first)
    return results


def _forward(input: Tensor, states: Tensors, params: Tensors, kind: str, *options: Any) -> list[Tensor]:
    """Torch's results in memory of their own; the output lies in the order of time."""
    with torch.no_grad():
        output, *finals = _by_torch(input, states, params, kind, *options)
        first, second = (1, 0) if options[-2] else (0, 1)  # the dimensions of time and batch
        output = output.permute(first, second, 2).contiguous().permute(first, second, 2)
        return [output, *(each.clone(memory_format=torch.contiguous_format) for each in finals)]


def _fake_forward(input: Tensor, states: Tensors, params: Tensors, kind: str, *options: Any) -> list[Tensor]:
    """The results of one time step, with an output as long as the input."""
    time = 1 if options[-2] else 0
    output, *finals = _forward(input.narrow(time, 0, 1), states, params, kind, *options)
    steps = output.new_empty(input.shape[time], input.shape[1 - time], output.shape[-1])
    return [steps.transpose(0, 1) if time else steps, *finals]


def _backward(
    input: Tensor, states: Tensors, params: Tensors, grads: Tensors, given: Sequence[bool], needed: Sequence[bool], *rest: Any
) -> list[Tensor]:
    """The gradients of the needed operands, in order. `given`: which results have a gradient."""
    operands = [each.detach().requires_grad_(need) for each, need in zip((input, *states, *params), needed, strict=True)]
    wanted = [operand for operand in operands if operand.requires_grad]
    with torch.enable_grad():
        results = _by_torch(operands[0], operands[1 : 1 + len(states)], operands[1 + len(states) :], *rest)
    read = [result for result, is_given in zip(results, given, strict=True) if is_given]
    found = torch.autograd.grad(read, wanted, grads, allow_unused=True, materialize_grads=True)
    return [each.clone(memory_format=torch.contiguous_format) for each in found]


def _fake_backward(
    input: Tensor, states: Tensors, params: Tensors, grads: Tensors, given: Sequence[bool], needed: Sequence[bool], *rest: Any
) -> list[Tensor]:
    operands = zip((input, *states, *params), needed, strict=True)
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each, need in operands if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, states, params, *ctx.options = inputs
    ctx.counts = len(states)
    ctx.save_for_backward(input, *states, *params)


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    input, *rest = ctx.saved_tensors
    states, params = rest[: ctx.counts], rest[ctx.counts :]
    first, of_states, of_params, *unneeded = ctx.needs_input_grad
    needed = [first, *of_states, *of_params]
    given = [grad for grad in grads if grad is not None]
    found = iter(BACKWARD(input, states, params, given, [grad is not None for grad in grads], needed, *ctx.options))
    own, *others = [next(found) if need else None for need in needed]
    return (own, others[: len(states)], others[len(states) :], *(None for _ in unneeded))


torch.library.impl("graphpp::recurrence", "CompositeExplicitAutograd", _forward, lib=_LIBRARY)
torch.library.impl("graphpp::recurrence_backward", "CompositeExplicitAutograd", _backward, lib=_LIBRARY)
torch.library.register_fake("graphpp::recurrence", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("graphpp::recurrence_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("graphpp::recurrence", _differentiate, setup_context=_save, lib=_LIBRARY)
