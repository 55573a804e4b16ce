"""A linear layer and the cross entropy of its results as one operator, which never has the results of all rows.

Contract: `linear_cross_entropy(hidden [rows, d], weight [words, d], bias or None, target [rows], ..)` computes the logits of
`tokens` rows at a time. While it has them, the forward also computes the gradients of the sum of the losses by `hidden`,
`weight` and `bias` (those that are `needed`); the backward multiplies them by the gradient of the loss. So there are as many
products as with all logits, and the gradient of the weight is alive from the forward to the backward. Softmax and losses are
computed in at least 32 bits. Gradients differ from those of one product by the rounding of a sum over the pieces.

Checked on torch 2.13.0; no private names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_LIBRARY.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int ignore_index, bool mean, "
    "float smoothing, float scale, ScalarType dtype, SymInt tokens, bool[] needed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LINEAR_CROSS_ENTROPY = torch.ops.graphpp.linear_cross_entropy.default
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """The operator's arguments after the tensors. `dtype`: of the loss; `needed`: gradients by hidden, weight and bias."""

    ignore_index: int
    mean: bool
    smoothing: float
    scale: float
    dtype: torch.dtype
    tokens: int
    needed: Sequence[bool]


def workspace(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Any:
    """Bytes of the logits of some rows, of their logarithms or slopes, and of a copy in the dtype of `hidden`."""
    wide, rows = torch.promote_types(hidden.dtype, torch.float32), torch.sym_min(hidden.shape[0], Options(*options).tokens)
    return rows * weight.shape[0] * (2 * wide.itemsize + (0 if hidden.dtype is wide else hidden.dtype.itemsize))


def flops(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Any:
    """FLOPs of the products of the forward: one for the logits, and one for each of the gradients by hidden and weight."""
    products = 1 + sum(Options(*options).needed[:2])
    return 2 * products * hidden.shape[0] * hidden.shape[1] * weight.shape[0]


def _forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Results:
    """The loss, the number by which losses and gradients are divided, and the gradients, empty where not needed."""
    option, wide = Options(*options), torch.promote_types(hidden.dtype, torch.float32)
    valid, smoothing = target != option.ignore_index, option.smoothing
    total = hidden.new_zeros((), dtype=wide)
    count = valid.sum().to(wide) if option.mean else torch.ones_like(total)
    grads = [each.new_zeros(each.shape if need else 0) for each, need in zip((hidden, weight), option.needed, strict=False)]
    grads.append(hidden.new_zeros(weight.shape[0] if bias is not None and option.needed[2] else 0, dtype=wide))
    for begin in range(0, hidden.shape[0], option.tokens):
        rows, words, real = (each[begin : begin + option.tokens] for each in (hidden, target, valid))
        scores = F.linear(rows, weight, bias).to(wide)
        logs = F.log_softmax(scores if option.scale == 1 else scores.mul_(option.scale), -1)
        del scores
        total += (1 - smoothing) * F.nll_loss(logs, words, ignore_index=option.ignore_index, reduction="sum")
        if smoothing:
            total -= smoothing / weight.shape[0] * (logs.sum(-1) * real).sum()
        if any(option.needed):
            slopes = _slopes(logs, words, real, option)
            own = slopes.to(rows.dtype)
            if option.needed[0]:
                grads[0][begin : begin + option.tokens] = own @ weight
            if option.needed[1]:
                grads[1].addmm_(own.t(), rows)
            grads[2] += slopes.sum(0) if grads[2].numel() else 0
    grads[2] = grads[2].to(wide if bias is None else bias.dtype)
    return (total / count).to(option.dtype), count, *grads  # type: ignore[return-value]


def _slopes(logs: Tensor, words: Tensor, real: Tensor, option: Options) -> Tensor:
    """The gradients of the sum of the losses by the logits of some rows, [rows, words], in the memory of `logs`."""
    slopes = logs.exp_().sub_(option.smoothing / logs.shape[1])
    slopes.scatter_add_(1, words.where(real, 0)[:, None], slopes.new_full((len(words), 1), option.smoothing - 1))
    return slopes.mul_(real[:, None]).mul_(option.scale)


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Results:
    option, wide = Options(*options), torch.promote_types(hidden.dtype, torch.float32)
    grads = [each.new_empty(each.shape if need else 0) for each, need in zip((hidden, weight), option.needed, strict=False)]
    last = bias.new_empty(bias.shape if option.needed[2] else 0) if bias is not None else hidden.new_empty(0, dtype=wide)
    return hidden.new_empty((), dtype=option.dtype), hidden.new_empty((), dtype=wide), *grads, last  # type: ignore[return-value]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    count, *grads = ctx.saved_tensors
    if loss is None:
        return (None,) * 11
    found = [(each.to(count.dtype) * (loss / count)).to(each.dtype) if each.numel() else None for each in grads]
    return (*found, *(None,) * 8)


_LIBRARY.impl("linear_cross_entropy", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("graphpp::linear_cross_entropy", _fake, lib=_LIBRARY)
torch.library.register_autograd("graphpp::linear_cross_entropy", _backward, setup_context=_set_up, lib=_LIBRARY)
