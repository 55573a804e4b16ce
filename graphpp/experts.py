"""Mixtures of experts over the ranks of a process group: tokens travel to the ranks of their experts, and answers back.

- Each rank of the group has its own tokens, and an equal number of the experts, contiguous in rank order. `routed` sends every
  token to the experts that a router chose for it, and adds up their answers, with gradients. Ranks of a second group may share
  each expert.
- Shapes do not depend on the router's choices: each expert has `capacity` slots for the tokens of each rank, and an empty slot
  is a row of zeros. Without a capacity there is a slot for each token, and no token is dropped.
- Ranks exchange values by differentiable collectives, so `routed` runs in eager, in a captured graph and under every schedule.
  All ranks of the group call it in the same order with tensors of equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from graphpp._torch.parallel.functional_collectives import all_gather, all_to_all, reduce_scatter
from graphpp.arguments import COUNT, FUNCTION, Accepted, checked, or_none, type_name
from graphpp.errors import GraphPPError

_GROUP = Accepted("a ProcessGroup of this rank", lambda value: isinstance(value, dist.ProcessGroup))
_MATRIX = partial(Accepted, accepts=lambda value: isinstance(value, torch.Tensor) and value.dim() == 2)
_TOKENS = _MATRIX("a tensor [tokens, width] (x.flatten(0, 1) of [batch, sequence, width])")
_CHOICES = _MATRIX("a tensor [tokens, choices], as of topk")


@checked(
    GraphPPError,
    tokens=_TOKENS,
    chosen=_CHOICES,
    weights=_CHOICES,
    compute=FUNCTION,
    experts=COUNT,
    group=or_none(_GROUP),
    tensor_group=or_none(_GROUP),
    capacity=or_none(COUNT),
)
def routed(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor], torch.Tensor],
    experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    tensor_group: dist.ProcessGroup | None = None,
    capacity: int | None = None,
) -> torch.Tensor:
    """The weighted sum of the answers of each token's experts, [tokens, width of an answer], of the dtype of an answer.

    `tokens`: [tokens of this rank, width]. `chosen`: [tokens, choices], integers from 0 to `experts` - 1, distinct for a token;
    `weights`: [tokens, choices]. `compute`: from [experts of this rank, slots, width] to [experts of this rank, slots, width of
    an answer]; slots are those of all ranks, in rank order. Parameters that only this rank's experts have must be `DTensor`s
    over the group: graphpp trains a plain parameter as one that all ranks share. `group`: the ranks with the experts (None: all
    are here). `tensor_group`: the ranks that share each of these experts (expert tensor parallelism, `etp`), with tokens of
    their own; `compute` then gets the slots of all of them, in rank order, and returns this rank's part of a sum over them.
    `capacity`: the slots of an expert for each rank (Switch Transformers, arXiv 2101.03961); a rank's last tokens
    beyond it get no answer of the expert. Two all-to-alls forward, two backward, and as many all-gathers and reduce-scatters
    over `tensor_group`.

    Without `capacity`, a token that chooses an expert twice gets NaN if the slots do not suffice. Raises `GraphPPError` for
    other shapes and dtypes, if the ranks do not divide the number of experts, and in eager on the CPU for an expert that does
    not exist; elsewhere torch raises its own error.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    _check(tokens, chosen, weights, experts, ranks)
    slots, choices = len(tokens) if capacity is None else capacity, chosen.shape[1]
    slot, found = _slots(chosen, experts, slots)
    sent = tokens.new_zeros(experts * slots + 1, tokens.shape[1])  # the last row takes the tokens without a slot
    sent = sent.index_copy(0, slot, tokens.repeat_interleave(choices, 0))[:-1]
    received = _exchanged(sent, group).unflatten(0, (ranks, experts // ranks, slots)).transpose(0, 1).flatten(1, 2)
    if tensor_group is not None:
        received = all_gather(received, 1, tensor_group)
    answers = compute(received)
    if not isinstance(answers, torch.Tensor) or answers.shape[:2] != received.shape[:2] or answers.dim() != received.dim():
        made = list(answers.shape) if isinstance(answers, torch.Tensor) else type_name(answers)
        raise GraphPPError(f"compute: return {[*received.shape[:2], 'width']} for {list(received.shape)}, got {made}")
    if tensor_group is not None:
        answers = reduce_scatter(answers, 1, tensor_group)
    returned = _exchanged(answers.unflatten(1, (ranks, slots)).transpose(0, 1).flatten(0, 2), group)
    chosen_answers = torch.cat([returned, returned.new_zeros(1, returned.shape[1])]).index_select(0, slot)
    share = weights.reshape(-1) if capacity is not None else weights.reshape(-1).masked_fill(~found, math.nan)
    total: torch.Tensor = (chosen_answers * share.unsqueeze(1)).unflatten(0, (-1, choices)).sum(1)
    return total.to(dtype=answers.dtype)


def _check(tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: int, ranks: int) -> None:
    if chosen.shape != weights.shape or len(chosen) != len(tokens):
        raise GraphPPError(
            f"chosen, weights: take one expert and one weight for each choice of {len(tokens)} tokens, got "
            f"{list(chosen.shape)} and {list(weights.shape)}"
        )
    if chosen.is_floating_point() or chosen.dtype is torch.bool:
        raise GraphPPError(f"chosen: take integers, the numbers of experts, got {chosen.dtype}")
    if not weights.is_floating_point():
        raise GraphPPError(f"weights: take floating-point numbers, got {weights.dtype}")
    if not chosen.shape[1]:
        raise GraphPPError("chosen: take one choice or more for each token, got 0")
    if type(chosen) is torch.Tensor and chosen.device.type == "cpu" and len(chosen) and not torch.compiler.is_compiling():
        least, most = (int(each) for each in chosen.aminmax())  # a trace has no numbers yet, a GPU would have to be waited for
        if least < 0 or most >= experts:
            raise GraphPPError(
                f"chosen: take experts from 0 to {experts - 1}, numbered over all ranks, got {least if least < 0 else most}"
            )
    if experts % ranks:
        raise GraphPPError(f"experts: {ranks} ranks do not divide {experts} experts equally: take a multiple of {ranks}")


def _slots(chosen: torch.Tensor, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each choice, int64 [tokens * choices], and whether there is one; without one, the number of slots in all.

    The slots of an expert are consecutive, and taken in the order of the tokens.
    """
    each = chosen.reshape(-1).to(torch.int64)
    order = each.argsort(stable=True)
    counts = each.new_zeros(experts).scatter_add(0, each, torch.ones_like(each))
    starts = counts.cumsum(0) - counts
    at = torch.arange(len(each), device=each.device)
    place = torch.empty_like(each).index_copy(0, order, at - starts[each[order]])
    return torch.where(place < slots, each * slots + place, experts * slots), place < slots


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send equal pieces of `rows`, in rank order, to the ranks; returns the received pieces in rank order."""
    return rows if group is None else all_to_all(rows, group)
