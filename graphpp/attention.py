"""Attention over packed documents, and over sequences that the ranks of a process group share (context parallelism).

- `packed` computes the attention of each document of a row to itself, as one operator of a captured graph.
- Each rank of the group has a part of every sequence: `sequence_part` cuts it, `sequence_positions` gives the positions of its
  tokens. A model calls `ulysses` or `gathered` in place of attention. Both give each rank its part of the output that one
  process computes for the whole sequence, and of its gradients.
- Ranks exchange values by differentiable collectives, so the functions run in eager, in a captured graph and under every
  schedule. All ranks of the group call them in the same order with tensors of equal shapes.
- For a loss over a rank's own tokens, graphpp averages gradients over the dimension `cp` of `mesh=`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from graphpp._torch.operators import packed_attention
from graphpp._torch.parallel.functional_collectives import all_gather, all_to_all
from graphpp.arguments import FLAG, INDEX, INTEGER, Accepted, checked, or_none
from graphpp.errors import GraphPPError

_GROUP = Accepted("a ProcessGroup of this rank", lambda value: isinstance(value, dist.ProcessGroup))
_TENSOR = Accepted("a tensor", lambda value: isinstance(value, torch.Tensor))
_ATTENTION_TENSOR = Accepted(
    "a tensor [batch, heads, tokens, width]", lambda value: isinstance(value, torch.Tensor) and value.dim() == 4
)
_ENDS = Accepted(
    "int32 [documents + 1] of one document or more",
    lambda value: isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype is torch.int32 and value.shape[0] > 1,
)
_LONGEST = Accepted("an integer", lambda value: isinstance(value, int | torch.SymInt) and not isinstance(value, bool))
_THREE = dict.fromkeys(("query", "key", "value"), _ATTENTION_TENSOR)


@checked(GraphPPError, **_THREE, cu_seqlens=_ENDS, max_seqlen=or_none(_LONGEST), is_causal=FLAG)
def packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each document of a packed row to itself; lengths and number of documents may differ in each call.

    `query`: [batch, heads, tokens, width]; `key`, `value`: the same, or a divisor of its heads. `cu_seqlens`: where documents
    begin, counted through all rows, and last the number of tokens, int32 [documents + 1]. `max_seqlen`: at least the tokens of
    the longest document; None for all tokens. `scale`: of the products; None for width ** -0.5. Returns the output, shaped as
    `query`.

    On the CPU the numbers are those of `scaled_dot_product_attention` on each document, with heads of key and value repeated.
    On a GPU all documents are one call of the kernel of `torch.nn.attention.varlen`. Raises `GraphPPError` for misshaped
    tensors, and on a GPU for types other than float16 and bfloat16. If `cu_seqlens` or `max_seqlen` do not fit, `ValueError` on
    the CPU, and a device-side assertion on a GPU.
    """
    same = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:] and key.shape == value.shape
    if not same or query.shape[1] % key.shape[1] or not query.dtype == key.dtype == value.dtype:
        given = ", ".join(f"{list(each.shape)} {each.dtype}" for each in (query, key, value))
        raise GraphPPError(f"packed: take tensors that are alike, or heads of key and value that divide query's, got {given}")
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        raise GraphPPError(f"packed: torch's flash kernel takes float16 and bfloat16, got {query.dtype}: cast the tensors")
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]  # [tokens of all rows, heads, width]
    longest = rows[0].shape[0] if max_seqlen is None else max_seqlen
    output = packed_attention.FORWARD(*rows, cu_seqlens, longest, is_causal, scale)[0]
    found: torch.Tensor = output.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)
    return found


@checked(GraphPPError, **_THREE, group=_GROUP)
def ulysses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention,
    **options: Any,
) -> torch.Tensor:
    """Attention in which each rank computes some of the heads over all tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

    `query`, `key`, `value`: [batch, heads, tokens of this rank, width], with contiguous parts of the sequence in rank order.
    `attention` is called with all tokens, the heads of this rank and `options`, such as `is_causal=True` or `enable_gqa=True`.
    Returns this rank's part of the output, shaped as `query`. Four all-to-alls forward, four backward. Raises `GraphPPError` if
    a tensor's number of heads is not a multiple of the ranks.
    """
    ranks = dist.get_world_size(group)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[1] % ranks:
            raise GraphPPError(
                f"{name}: {ranks} ranks do not divide its {tensor.shape[1]} heads: repeat the heads of key and value, or call "
                "graphpp.attention.gathered, which needs no heads"
            )
    result = attention(*(_heads_to_ranks(each, ranks, group) for each in (query, key, value)), **options)
    return _tokens_to_ranks(result, ranks, group)


@checked(GraphPPError, **_THREE, group=_GROUP, positions=or_none(_TENSOR), is_causal=FLAG)
def gathered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    positions: torch.Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, which are gathered (Llama 3, arXiv 2407.21783).

    `query`, `key`, `value`: [batch, heads, tokens of this rank, width]. `positions`: of this rank's tokens in the sequence,
    integers [tokens of this rank]; None for contiguous parts in order of rank. With `is_causal` a token attends to those at its
    position and before, of all documents: for packed rows call `ulysses` with `attention=packed`. `options` go to
    `torch.nn.functional.scaled_dot_product_attention`. Returns this rank's part of the output, shaped as `query`. Two gathers
    forward, two reductions backward. Raises `GraphPPError` for `attn_mask` and misshaped positions.
    """
    if "attn_mask" in options:
        raise GraphPPError("attn_mask: gathered makes the mask of is_causal and positions; for another one call ulysses")
    tokens = query.shape[2]
    if positions is not None and (positions.shape != (tokens,) or positions.is_floating_point()):
        raise GraphPPError(f"positions: take integers of shape [{tokens}], got {positions.dtype} {list(positions.shape)}")
    mask = None
    if is_causal:
        own = sequence_positions(tokens, group, device=query.device) if positions is None else positions
        mask = all_gather(own, 0, group) <= own.unsqueeze(1)
    keys, values = (all_gather(each, 2, group) for each in (key, value))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)


@checked(GraphPPError, tensor=_TENSOR, group=_GROUP, dim=INTEGER, balanced=FLAG)
def sequence_part(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 1, *, balanced: bool = False) -> torch.Tensor:
    """This rank's part of a whole sequence along `dim`, contiguous in memory, with the tokens of `sequence_positions`.

    Raises `GraphPPError` if the parts would be unequal.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise GraphPPError(f"dim: the tensor has {tensor.dim()} dimensions, got {dim}")
    size, ranks = tensor.shape[dim], dist.get_world_size(group)
    pieces = 2 * ranks if balanced else ranks
    if size % pieces:
        raise GraphPPError(f"tensor: its {size} tokens along dimension {dim} do not make {pieces} equal pieces: pad them")
    return tensor.index_select(dim, sequence_positions(size // ranks, group, balanced=balanced, device=tensor.device))


@checked(GraphPPError, tokens=INDEX, group=_GROUP, balanced=FLAG)
def sequence_positions(
    tokens: int, group: dist.ProcessGroup, *, balanced: bool = False, device: torch.device | None = None
) -> torch.Tensor:
    """The positions of this rank's tokens in the whole sequence, int64 [tokens]; contiguous parts in rank order.

    `balanced`: of 2 n pieces rank r of n has pieces r and 2 n - 1 - r, so that under causal attention (`gathered` with these
    positions) all ranks have equal work; raises `GraphPPError` for an odd number of tokens.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if not balanced:
        return torch.arange(rank * tokens, (rank + 1) * tokens, device=device)
    if tokens % 2:
        raise GraphPPError(f"tokens: balanced parts are two pieces of equal size, got {tokens} tokens")
    half = tokens // 2
    pieces = (rank, 2 * ranks - 1 - rank)
    return torch.cat([torch.arange(at * half, (at + 1) * half, device=device) for at in pieces])


def _heads_to_ranks(tensor: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, heads, tokens of this rank, width] -> [batch, heads of this rank, tokens, width]."""
    parts = all_to_all(tensor.unflatten(1, (ranks, -1)).movedim(1, 0).flatten(0, 1), group)
    found: torch.Tensor = parts.unflatten(0, (ranks, -1)).movedim(0, 2).flatten(2, 3)
    return found


def _tokens_to_ranks(tensor: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, heads of this rank, tokens, width] -> [batch, heads, tokens of this rank, width]."""
    parts = all_to_all(tensor.unflatten(2, (ranks, -1)).movedim(2, 0).flatten(0, 1), group)
    found: torch.Tensor = parts.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)
    return found
