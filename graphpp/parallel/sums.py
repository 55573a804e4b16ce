"""Sums of tensors over the ranks of a group: the protocol of an implementation, and the bundling of tensors.

`ordered_sums.py` adds in the order of the ranks; `backend_sums.py` leaves the order to the group's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

_BUNDLE = 2**23  # bytes


PendingSums = Callable[[], list[torch.Tensor]]
"""Pending sums: a call waits for the messages, frees their memory, and adds. Call it once."""


class Sums(Protocol):
    """Starts to sum contiguous tensors of one dtype in common messages. All ranks start equal sums in the same order."""

    def scattered(
        self,
        totals: list[torch.Tensor],
        lengths: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> PendingSums:
        """Sum this rank's part of each tensor; the results are [elements of the part].

        Empties the list `totals`, so that packed tensors are freed before parts arrive. `lengths`: for each tensor the elements
        of each rank's part, in order; `dtypes`: of each sum (None: the tensors' dtypes).
        """

    def everywhere(self, total: torch.Tensor, group: dist.ProcessGroup) -> PendingSums:
        """Sum a tensor, [elements], on every rank; the result is one tensor of its shape. Takes over the memory of `total`.

        Pending sums may send messages too, so all ranks must call them in the same order.
        """


def reduced_in_place(total: torch.Tensor, group: dist.ProcessGroup) -> PendingSums:
    work = dist.all_reduce(total, group=group, async_op=True)
    assert work is not None, "the collective was started with async_op"

    def results() -> list[torch.Tensor]:
        work.wait()
        return [total]

    return results


def bundles(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors to send together: of one dtype, in order, up to `_BUNDLE` bytes unless one tensor is larger."""
    found: list[list[int]] = []
    sizes: list[int] = []
    latest: dict[torch.dtype, int] = {}  # the last bundle of each dtype
    for position, tensor in enumerate(tensors):
        at = latest.get(tensor.dtype)
        if at is None or sizes[at] + tensor.nbytes > _BUNDLE:
            at = latest[tensor.dtype] = len(found)
            found.append([])
            sizes.append(0)
        found[at].append(position)
        sizes[at] += tensor.nbytes
    return found


def merged(tensors: MutableMapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[torch.Tensor]:
    """The elements of some of the tensors, bundle by bundle, [elements] of a bundle.

    The tensors become contiguous views of their bundle's memory. Contiguous tensors that are adjacent in one memory keep it.
    """
    for bundle in bundles([tensors[name] for name in names]):
        own = [names[at] for at in bundle]
        together = [tensors[name] for name in own]
        flat = _flat(together)
        if flat is None:
            flat = torch.cat([each.reshape(-1) for each in together])
            pieces = flat.split([each.numel() for each in together])
            tensors.update((name, piece.view(each.shape)) for name, piece, each in zip(own, pieces, together, strict=True))
        yield flat


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All elements of contiguous tensors that follow each other in one memory, [elements]; None for other tensors."""
    first, elements = tensors[0], 0
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in tensors:
        apart = each.storage_offset() != start + elements or each.untyped_storage().data_ptr() != memory
        if apart or not each.is_contiguous() or each.is_conj() or each.is_neg():  # lazily conjugated or negated
            return None
        elements += each.numel()
    return first.as_strided((elements,), (1,), start)
