"""Sums of tensors over the ranks of a group, added in the order of the ranks.

Contract
--------
- A sum has the bits of a plain loop over the ranks, `((t0 + t1) + t2) + ..`, whatever the group's backend. Tensors of less than
  32 bits are added in float32 and rounded once, to the dtype of the sum.
- `scattered` sends each rank the parts that it sums, as many bytes as a reduce-scatter by ring. `everywhere` gives every rank
  the whole sum: each rank sums one part and sends it to the others, or, for small tensors, sums all of it. Two ranks take an
  all-reduce: a sum of two numbers has the same bits in both orders.
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
_BUNDLE = 2**23  # bytes
_NO_ORDER = 2  # ranks whose numbers add up to the same bits in both orders


@dataclass(frozen=True)
class PendingSums:
    """Sums whose messages are under way; `results` waits for them and adds, once."""

    work: dist.Work
    results: Callable[[], list[torch.Tensor]]


def scattered(
    totals: Sequence[torch.Tensor],
    lengths: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    dtypes: Sequence[torch.dtype] | None = None,
) -> PendingSums:
    """Start to sum this rank's part of each tensor; the results are [elements of the part].

    `totals`: contiguous, of one dtype; `lengths`: for each the elements of each rank's part, in order; `dtypes`: of each sum
    (None: that of the tensors).
    """
    wanted = dtypes if dtypes is not None else [each.dtype for each in totals]
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
        sums = _in_order(parts.view(ranks, sum(own))).split(own)
        return [each.to(dtype=dtype) for each, dtype in zip(sums, wanted, strict=True)]

    return PendingSums(work, add)


def everywhere(totals: Sequence[torch.Tensor], group: dist.ProcessGroup) -> PendingSums:
    """Start to sum tensors of one dtype, contiguous, on every rank; the results are tensors of their shapes.

    The memory of `totals` is taken over. `results` sends messages too: all ranks ask for the results of several sums in the
    same order.
    """
    ranks = dist.get_world_size(group)
    flat = torch.cat([total.view(-1) for total in totals]) if len(totals) > 1 else totals[0].view(-1)
    if ranks == _NO_ORDER:
        reduced = dist.all_reduce(flat, group=group, async_op=True)
        assert reduced is not None, "the collective was started with async_op"

        def wait() -> list[torch.Tensor]:
            reduced.wait()
            return _like(totals, flat)

        return PendingSums(reduced, wait)
    if flat.nbytes <= _SMALL:
        parts = flat.new_empty((ranks, flat.numel()))
        work = all_gather_many([parts], [flat], group)

        def add() -> list[torch.Tensor]:
            work.wait()
            return _like(totals, _in_order(parts).to(dtype=flat.dtype))

        return PendingSums(work, add)
    each = -(-flat.numel() // ranks)
    lengths = [max(0, min(each, flat.numel() - rank * each)) for rank in range(ranks)]
    pending = scattered([flat], [lengths], group)

    def gather() -> list[torch.Tensor]:
        gathered, own = flat.new_empty(ranks * each), flat.new_empty(each)
        own[: lengths[dist.get_rank(group)]] = pending.results()[0]
        all_gather_many([gathered], [own], group).wait()
        return _like(totals, gathered[: flat.numel()])

    return PendingSums(pending.work, gather)


def bundles(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors to send together: of one dtype, in order, up to `_BUNDLE` bytes unless one alone is larger."""
    found: list[list[int]] = []
    sizes: list[int] = []
    latest: dict[torch.dtype, int] = {}  # the bundle of each dtype that is not full
    for position, tensor in enumerate(tensors):
        at = latest.get(tensor.dtype)
        if at is None or sizes[at] + tensor.nbytes > _BUNDLE:
            at = latest[tensor.dtype] = len(found)
            found.append([])
            sizes.append(0)
        found[at].append(position)
        sizes[at] += tensor.nbytes
    return found


def _like(totals: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """The pieces of `flat` in the shapes of `totals`."""
    pieces = flat.split([total.numel() for total in totals])
    return [piece.view(total.shape) for piece, total in zip(pieces, totals, strict=True)]


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of `parts`, [ranks, elements], in order; of 32 bits or more."""
    narrow = parts.is_floating_point() and parts.element_size() < torch.float32.itemsize
    rows = parts.to(torch.float32) if narrow else parts
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0].clone()
    for row in rows[2:]:
        total.add_(row)
    return total


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)
