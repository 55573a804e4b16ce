"""Attention within the documents of a packed row, as one operator of a graph with a backward of its own.

Contract: `FORWARD` gives the output and the logarithms of the softmax's sums, `BACKWARD` the gradients of query, key and value.
On the CPU each document is one call of the kernel of `scaled_dot_product_attention`, on a GPU all are one call of the flash
kernel. The sizes of all results follow from those of the operands, so lengths of documents are data, and no trace reads them.

Checked on torch 2.11.0 and 2.13.0:

- `aten._scaled_dot_product_flash_attention_for_cpu`, and `_backward`: the CPU's kernel
- `aten._flash_attention_forward`, `aten._flash_attention_backward`: the kernel of `torch.nn.attention.varlen`
- `torch._assert_async`: an error of a later call if a condition on the GPU is false
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, bool is_causal, float? scale"
_LIBRARY.define(f"packed_attention({_OPERANDS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"packed_attention_backward(Tensor grad, Tensor out, Tensor sums, {_OPERANDS}) -> (Tensor, Tensor, Tensor)")
FORWARD, BACKWARD = torch.ops.graphpp.packed_attention, torch.ops.graphpp.packed_attention_backward
Three = tuple[Tensor, Tensor, Tensor]


def forward_flops(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *rest: Any) -> Any:
    """FLOPs of both products over documents of equal length; the backward computes 2.5 times as many."""
    tokens, heads, width = query.shape
    return 4 * heads * width * tokens * tokens // (cu_seqlens.shape[0] - 1)


def _documents(cu_seqlens: Tensor, tokens: int, max_seqlen: int) -> Iterator[slice]:
    """The tokens of each document that has some. Raises `ValueError` if the documents do not make up the row."""
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens: take the beginnings of documents, from 0 on, and last the {tokens} tokens of the rows, got {ends}. "
            "For rows that ranks share call graphpp.attention.ulysses with attention=graphpp.attention.packed"
        )
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen: the longest document has {max(lengths)} tokens, got {max_seqlen}")
    return (slice(start, end) for start, end in pairwise(ends) if end > start)


def _batched(tensor: Tensor, heads: int) -> Tensor:
    """[tokens, its heads, width] -> [1, heads, tokens, width]."""
    return tensor.transpose(0, 1).unsqueeze(0).repeat_interleave(heads // tensor.shape[1], 1)


def _of_heads(grad: Tensor, like: Tensor) -> Tensor:
    """[1, heads, tokens, width] -> as `like`, [tokens, its heads, width]: sums over the heads that shared one."""
    by_head: Tensor = grad[0].unflatten(0, (like.shape[1], -1))
    return by_head.sum(1).transpose(0, 1)


def _forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, causal: bool, scale: Any) -> Any:
    out, sums = _fake_forward(query)
    for part in _documents(cu, len(query), longest):
        three = (_batched(each[part], query.shape[1]) for each in (query, key, value))
        found, logs = aten._scaled_dot_product_flash_attention_for_cpu(*three, 0.0, causal, scale=scale)
        out[part], sums[:, part] = found[0].transpose(0, 1), logs[0]
    return out, sums


def _backward_on_cpu(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, *rest: Any
) -> Three:
    longest, causal, scale = rest
    results = _fake_backward(grad, out, sums, query, key, value)
    for part in _documents(cu, len(query), longest):
        operands = [_batched(each[part], query.shape[1]) for each in (grad, query, key, value, out)]
        logs = sums[:, part].unsqueeze(0)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for result, found in zip(results, kernel(*operands, logs, 0.0, causal, scale=scale), strict=True):
            result[part] = _of_heads(found, result)
    return results


def _forward_on_gpu(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, causal: bool, scale: Any) -> Any:
    lengths = cu.diff()  # the kernel would read other memory, or skip tokens
    fits = (cu[0] == 0) & (cu[-1] == query.shape[0]) & (lengths.min() >= 0) & (lengths.max() <= longest)
    torch._assert_async(fits, "cu_seqlens, max_seqlen: they do not fit the tokens of the packed rows")
    out, sums, *_ = aten._flash_attention_forward(
        query, key, value, cu, cu, longest, longest, 0.0, causal, return_debug_mask=False, scale=scale
    )
    return out, sums


def _backward_on_gpu(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, *rest: Any
) -> Three:
    longest, causal, scale = rest
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    results: Three = aten._flash_attention_backward(
        grad, query, key, value, out, sums, cu, cu, longest, longest, 0.0, causal, state, unused, scale=scale
    )
    return results


def _fake_forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=dtype)


def _fake_backward(grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Three:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    found = BACKWARD(grad.contiguous(), *ctx.saved_tensors, ctx.longest, ctx.causal, ctx.scale)
    return (*found, None, None, None, None)


for _device, _kernels in (("CPU", (_forward_on_cpu, _backward_on_cpu)), ("CUDA", (_forward_on_gpu, _backward_on_gpu))):
    for _name, _kernel in zip(("packed_attention", "packed_attention_backward"), _kernels, strict=True):
        _LIBRARY.impl(_name, _kernel, _device)
torch.library.register_fake("graphpp::packed_attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("graphpp::packed_attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("graphpp::packed_attention", _differentiate, setup_context=_save, lib=_LIBRARY)
