"""Sums of tensors over the ranks of a group, in the order of the group's backend (ring, tree, switch); implements `Sums`.

Contract: a reduce-scatter and an all-reduce, whose bits depend on the number of ranks, the size and the machine. Numbers are
added in the dtype in which they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphpp._torch.distributed import reduce_scatter
from graphpp.parallel.sums import PendingSums, reduced_in_place


def scattered(
    totals: list[torch.Tensor],
    lengths: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    dtypes: Sequence[torch.dtype] | None = None,
) -> PendingSums:
    wanted = dtypes if dtypes is not None else [each.dtype for each in totals]
    own = [each[dist.get_rank(group)] for each in lengths]
    sent, longest = _padded(totals, lengths)
    totals.clear()
    part = sent.new_empty(longest)
    work = reduce_scatter(_real(part), _real(sent), group)

    def results() -> list[torch.Tensor]:
        work.wait()
        sums = part[: sum(own)].split(own)
        return [each.to(dtype=dtype) for each, dtype in zip(sums, wanted, strict=True)]

    return results


def everywhere(total: torch.Tensor, group: dist.ProcessGroup) -> PendingSums:
    return reduced_in_place(total, group)


def _padded(totals: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """(the concatenated parts of all ranks, each padded to the longest; the elements of the longest)."""
    parts = [total.view(-1).split(list(each)) for total, each in zip(totals, lengths, strict=True)]
    sizes = [sum(each) for each in zip(*lengths, strict=True)]
    longest = max(sizes)
    if len(totals) == 1 and min(sizes) == longest:
        return totals[0].view(-1), longest
    padding = totals[0].new_zeros(longest - min(sizes))
    pieces = [[*(each[to] for each in parts), padding[: longest - size]] for to, size in enumerate(sizes)]
    return torch.cat([piece for of_rank in pieces for piece in of_rank]), longest


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real numbers, [.., 2], because collectives do not add complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
