"""Sums of tensors over the ranks of a group, added in the order of the ranks.

Contract
--------
- A sum has the bits of a plain loop over the ranks, `((t0 + t1) + t2) + ..`, whatever the group's backend. Tensors of less than
  32 bits are added in float32 and rounded once.
- `scattered` sends each rank the parts that it sums, as many bytes as a reduce-scatter by ring. `everywhere` gives every rank
  the whole sum: each rank sums one part and sends it to the others, or, for small tensors, sums all of it.
- Both start the messages and return at once. All ranks start the same sums in the same order, and ask for the results of
  `everywhere` in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many

_SMALL = 2**14  # bytes up to which every rank gets all tensors: one collective is faster than two



@dataclass(frozen=True)
class PendingSum:
    """A sum whose messages are under way; `result` waits for them and adds, once."""

    work: dist.Work
    result: Callable[[], torch.Tensor]


def scattered(total: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> PendingSum:
    """Start the sum of this rank's part; the result is a new tensor [elements of the part].

    `total`: contiguous; `lengths`: the elements of each rank's part, in order.
    """
    own, ranks = lengths[dist.get_rank(group)], len(lengths)
    parts = total.new_empty(ranks * own)
    size = total.element_size()
    received, sent = [own * size] * ranks, [length * size for length in lengths]
    work = dist.all_to_all_single(_bytes(parts), _bytes(total), received, sent, group=group, async_op=True)
    assert work is not None, "the collective was started with async_op"

    def add() -> torch.Tensor:
        work.wait()
        return _in_order(parts.view(ranks, own))

    return PendingSum(work, add)


def everywhere(total: torch.Tensor, group: dist.ProcessGroup) -> PendingSum:
    """Start the sum of all of `total`, contiguous; the result is a new tensor of its shape, on every rank."""
    ranks = dist.get_world_size(group)
    if total.nbytes <= _SMALL:
        parts = total.new_empty((ranks, total.numel()))
        work = all_gather_many([parts], [total], group)

        def add() -> torch.Tensor:
            work.wait()
            return _in_order(parts).view(total.shape)

        return PendingSum(work, add)
    each = -(-total.numel() // ranks)
    lengths = [max(0, min(each, total.numel() - rank * each)) for rank in range(ranks)]
    part = scattered(total, lengths, group)

    def gather() -> torch.Tensor:
        padded, own = total.new_empty(ranks * each), total.new_empty(each)
        own[: lengths[dist.get_rank(group)]] = part.result()
        all_gather_many([padded], [own], group).wait()
        return padded[: total.numel()].view(total.shape)

    return PendingSum(part.work, gather)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of `parts`, [ranks, elements], in order."""
    narrow = parts.is_floating_point() and parts.element_size() < torch.float32.itemsize
    total = parts[0].to(torch.float32) if narrow else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)
