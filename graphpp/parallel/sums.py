"""Sums of tensors over the ranks of a group: the form of an implementation, and how tensors travel together.

There are two: `ordered_sums.py` adds in the order of the ranks, `backend_sums.py` leaves the order to the group's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

_BUNDLE = 2**23  # bytes


@dataclass(frozen=True)
class PendingSums:
    """Sums whose messages are under way; `results` waits for them and adds, once."""

    work: dist.Work
    results: Callable[[], list[torch.Tensor]]


class Sums(Protocol):
    """Starts to sum several contiguous tensors of one dtype, which travel together. All ranks start equal sums in one order."""

    def scattered(
        self,
        totals: Sequence[torch.Tensor],
        lengths: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> PendingSums:
        """Sum this rank's part of each tensor; the results are [elements of the part].

        `lengths`: for each tensor the elements of each rank's part, in order; `dtypes`: of each sum (None: that of the
        tensors).
        """

    def everywhere(self, totals: Sequence[torch.Tensor], group: dist.ProcessGroup) -> PendingSums:
        """Sum the tensors on every rank; the results are tensors of their shapes.

        The memory of `totals` is taken over. `results` may send messages too: all ranks ask for the results of several sums in
        the same order.
        """


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


def joined(totals: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of several tensors, [elements]; the memory of the tensor where there is one."""
    return torch.cat([total.view(-1) for total in totals]) if len(totals) > 1 else totals[0].view(-1)


def parted(flat: torch.Tensor, totals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of `flat` in the shapes of `totals`."""
    pieces = flat.split([total.numel() for total in totals])
    return [piece.view(total.shape) for piece, total in zip(pieces, totals, strict=True)]
