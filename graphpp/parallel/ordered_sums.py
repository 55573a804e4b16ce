"""Sums of tensors over the ranks of a group, added in the order of the ranks; implements `Sums` (`sums.py`).

Contract:
- A sum is bit-equal to a loop over the ranks, `((t0 + t1) + t2) + ..`, with every backend. Dtypes below 32 bits are added in
  float32 and rounded once, to the dtype of the sum.
- `scattered` sends as many bytes as a ring reduce-scatter. In `everywhere` each rank sums one part and sends it to the others,
  or all of a small tensor. Two ranks use an all-reduce: two numbers have the same sum in both orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many
from graphpp.parallel.sums import PendingSums, reduced_in_place

_SMALL = 2**14  # bytes up to which every rank receives all tensors: one collective is faster than two
_NO_ORDER = 2  # ranks whose sum does not depend on the order


def scattered(
    totals: list[torch.Tensor],
    lengths: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    dtypes: Sequence[torch.dtype] | None = None,
) -> PendingSums:
    wanted = dtypes if dtypes is not None else [each.dtype for each in totals]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = [total.view(-1) for total in totals]
    pieces = [total.split(list(each)) for total, each in zip(flat, lengths, strict=True)]
    sent = torch.cat([each[to] for to in range(ranks) for each in pieces]) if len(flat) > 1 else flat[0]
    own = [each[rank] for each in lengths]
    del flat, pieces
    totals.clear()
    parts = sent.new_empty(ranks * sum(own))
    works = [_exchanged(parts, sent, [sum(each[to] for each in lengths) for to in range(ranks)], group)]
    del sent

    def add() -> list[torch.Tensor]:
        works.pop().wait()  # drops the last reference to the sent elements
        sums = _in_order(parts.view(ranks, sum(own))).split(own)
        return [each.to(dtype=dtype) for each, dtype in zip(sums, wanted, strict=True)]

    return add


def everywhere(total: torch.Tensor, group: dist.ProcessGroup) -> PendingSums:
    ranks, elements = dist.get_world_size(group), total.numel()
    if ranks == _NO_ORDER:
        return reduced_in_place(total, group)
    if total.nbytes <= _SMALL:
        parts = total.new_empty((ranks, elements))
        work = all_gather_many([parts], [total], group)

        def add() -> list[torch.Tensor]:
            work.wait()
            return [_in_order(parts).to(dtype=total.dtype)]

        return add
    each = -(-elements // ranks)
    lengths = [max(0, min(each, elements - rank * each)) for rank in range(ranks)]
    own, room = lengths[dist.get_rank(group)], total.new_empty(ranks * each)  # first for the parts, then for the sum
    parts = room[: ranks * own]
    exchange = _exchanged(parts, total, lengths, group)

    def gather() -> list[torch.Tensor]:
        exchange.wait()
        added = _in_order(parts.view(ranks, own)).to(dtype=total.dtype)
        sent = added if own == each else torch.cat([added, added.new_zeros(each - own)])
        all_gather_many([room], [sent], group).wait()
        return [room[:elements]]

    return gather


def _exchanged(parts: torch.Tensor, sent: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> dist.Work:
    """Start to send each rank its elements of `sent` (`lengths` per rank); `parts` receives this rank's part of all ranks."""
    size, ranks = sent.element_size(), len(lengths)
    received, given = [len(parts) // ranks * size] * ranks, [elements * size for elements in lengths]
    work: dist.Work | None = dist.all_to_all_single(
        _bytes(parts), _bytes(sent), received, given, group=group, async_op=True
    )
    assert work is not None, "the collective was started with async_op"
    return work


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of `parts`, [ranks, elements], in order, in at least 32 bits."""
    narrow = parts.is_floating_point() and parts.element_size() < torch.float32.itemsize
    rows = parts.to(torch.float32) if narrow else parts
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0].clone()
    for row in rows[2:]:
        total.add_(row)
    return total


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; gloo lacks some dtypes."""
    return tensor.view(-1).view(torch.uint8)
