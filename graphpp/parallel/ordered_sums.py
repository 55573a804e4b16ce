"""Sums of tensors over the ranks of a group, added in the order of the ranks.

Contract
--------
- A sum has the bits of a plain loop over the ranks, `((t0 + t1) + t2) + ..`, whatever the group's backend. Tensors of less than
  32 bits are added in float32 and rounded once.
- `scattered` sends each rank the parts that it sums, as many bytes as a reduce-scatter by ring. `everywhere` gives every rank
  the whole sum: each rank sums one part and sends it to the others, or, for small tensors, sums all of it.
- Both take several tensors of one dtype and send them together, for a message takes time. All ranks start the same sums in the
  same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many

_SMALL = 2**14  # bytes up to which every rank gets all tensors: one collective is faster than two



@dataclass(frozen=True)
class PendingSums:
    """Sums whose messages are under way; `results` waits for them and adds, once."""

    work: dist.Work
    results: Callable[[], list[torch.Tensor]]


def scattered(totals: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]], group: dist.ProcessGroup) -> PendingSums:
    """Start to sum this rank's part of each tensor; the results are [elements of the part].

    `totals`: contiguous, of one dtype; `lengths`: for each the elements of each rank's part, in order.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = [total.view(-1) for total in totals]
    pieces = [total.split(list(each)) for total, each in zip(flat, lengths, strict=True)]
    sent = torch.cat([each[to] for to in range(ranks) for each in pieces]) if len(flat) > 1 else flat[0]
    own = [each[rank] for each in lengths]
    parts = sent.new_empty(ranks * sum(own))
    size = sent.element_size()
    work = dist.all_to_all_single(
        _bytes(parts),
        _bytes(sent),
        [sum(own) * size] * ranks,
        [sum(each[to] for each in lengths) * size for to in range(ranks)],
        group=group,
        async_op=True,
    )
    assert work is not None, "the collective was started with async_op"

    def add() -> list[torch.Tensor]:
        work.wait()
        return list(_in_order(parts.view(ranks, sum(own))).split(own))

    return PendingSums(work, add)


def everywhere(totals: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The sums of tensors of one dtype, contiguous, on every rank: new tensors of their shapes."""
    ranks = dist.get_world_size(group)
    flat = torch.cat([total.view(-1) for total in totals])
    if flat.nbytes <= _SMALL:
        parts = flat.new_empty((ranks, flat.numel()))
        all_gather_many([parts], [flat], group).wait()
        summed = _in_order(parts)
    else:
        each = -(-flat.numel() // ranks)
        lengths = [max(0, min(each, flat.numel() - rank * each)) for rank in range(ranks)]
        gathered, own = flat.new_empty(ranks * each), flat.new_empty(each)
        own[: lengths[dist.get_rank(group)]] = scattered([flat], [lengths], group).results()[0]
        all_gather_many([gathered], [own], group).wait()
        summed = gathered[: flat.numel()]
    pieces = summed.split([total.numel() for total in totals])
    return [piece.view(total.shape) for piece, total in zip(pieces, totals, strict=True)]


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of `parts`, [ranks, elements], in order."""
    narrow = parts.is_floating_point() and parts.element_size() < torch.float32.itemsize
    rows = parts.to(torch.float32) if narrow else parts
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0].clone()
    for row in rows[2:]:
        total.add_(row)
    return total.to(parts.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)
