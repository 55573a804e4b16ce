"""Compares the data that each rank of a pipeline was given, and sends absent data to the ranks that read them.

Contract:
- `checksums` has one number per tensor: of all elements in the first `_FIRST` calls and then in every n-th call; in other calls
  of a sample of one microbatch. Samples skip tensors on a GPU, for which the host would wait.
- A tensor on the meta device stands for absent data. `holdings_of_ranks` raises `BatchError` on all ranks if a rank reads data
  that no rank was given; `filled` sends data from the lowest rank that was given them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.errors import BatchError
from graphpp.parallel.agreement import Agreement, refuse_differences
from graphpp.parallel.checksum import checksum, checksum_of_sample
from graphpp.parallel.facts import Facts

_FIRST = 3  # calls of which all elements are compared

Place = tuple[int, str]  # the index of a microbatch and the path of a tensor in it


def checksums(parts: Sequence[FlatMicrobatch], call: int, every: int) -> dict[str, int | None]:
    """The checksums of a call's tensors by name, None for an absent tensor.

    `call`: the number of the call among its kind, from 1. `every`: every n-th call compares all elements; 0: none does.
    """
    return {_name(place): total for place, total in _sums(parts, call, every).items()}


def _sums(parts: Sequence[FlatMicrobatch], call: int, every: int) -> dict[Place, int | None]:
    whole = every > 0 and (call <= _FIRST or call % every == 0)
    found: dict[Place, int | None] = {}
    for index, part in enumerate(parts):
        sampled = every > 0 and _drawn(call, len(parts)) == index
        for path, tensor in part.tensors.items():
            if tensor.is_meta:
                found[index, path] = None
            elif whole:
                found[index, path] = checksum(tensor)
            elif sampled and tensor.device.type == "cpu":
                found[index, path] = checksum_of_sample(tensor)
    return found


def _drawn(call: int, count: int) -> int:
    """A pseudo-random choice of one of `count` microbatches, equal on all ranks."""
    return ((call * 0x9E3779B1) >> 16) % count


class _Holding(NamedTuple):
    """One rank's facts about one tensor: given data, read by a stage, has a checksum, the checksum."""

    given: bool
    read: bool
    checked: bool
    total: int


Holdings = dict[Place, list[_Holding]]  # by rank of the pipeline


def holdings_of_ranks(
    parts: Sequence[FlatMicrobatch], read: Collection[str], call: int, every: int, agreement: Agreement
) -> Holdings:
    """The facts of all ranks about each tensor. Called by all ranks, with tensors of equal shapes and dtypes.

    `read`: the paths that this rank's stages read. `call`, `every`: as for `checksums`. Raises on all ranks: `MismatchError`
    if ranks were given different data, and `BatchError` if no rank was given data that a rank reads.
    """
    tensors, sums = _tensors(parts), _sums(parts, call, every)
    totals = {place: sums.get(place) for place in tensors}
    own = [
        (not tensor.is_meta, place[1] in read, totals[place] is not None, totals[place] or 0)
        for place, tensor in tensors.items()
    ]
    everyone = agreement.of_all(torch.tensor(own, dtype=torch.int64, device="cpu"))
    holdings = {place: [_Holding(*row) for row in everyone[:, at].tolist()] for at, place in enumerate(tensors)}
    _check(holdings, agreement)
    return holdings


def filled(parts: Sequence[FlatMicrobatch], holdings: Holdings, agreement: Agreement) -> list[FlatMicrobatch]:
    """The microbatches with all tensors that this rank reads. Called by all ranks, with equal `holdings`."""
    received = _exchanged(_tensors(parts), holdings, agreement)
    pairs = [list(zip(part.paths, part.values, strict=True)) for part in parts]
    values = [tuple(received.get((index, path), leaf) for path, leaf in each) for index, each in enumerate(pairs)]
    return [replace(part, values=new) for part, new in zip(parts, values, strict=True)]


def _check(holdings: Holdings, agreement: Agreement) -> None:
    lines = {}
    for rank in range(agreement.ranks):
        own = {_name(place): each[rank].total for place, each in holdings.items() if each[rank].checked}
        lines[agreement.name_of(rank)] = Facts({}, own).all_lines
    refuse_differences(lines)
    for place, each in holdings.items():
        readers = [rank for rank, holding in enumerate(each) if holding.read]
        if readers and not any(holding.given for holding in each):
            raise BatchError(
                f"no rank was given {_name(place)}, which rank {readers[0]} of the pipeline reads: give the tensor with its "
                "data on one rank at least (pipe.inputs_needed() lists the arguments that a rank reads)"
            )


def _exchanged(
    tensors: dict[Place, torch.Tensor], holdings: Holdings, agreement: Agreement
) -> dict[Place, torch.Tensor]:
    """The tensors that this rank receives: absent tensors that it reads, each from the lowest rank that was given it."""
    received: dict[Place, torch.Tensor] = {}
    messages = []
    for place, each in holdings.items():
        source = next((rank for rank, holding in enumerate(each) if holding.given), None)
        for rank, holding in enumerate(each):
            if source is None or holding.given or not holding.read:
                continue
            if agreement.rank == source:
                messages.append(agreement.message(dist.isend, tensors[place].detach().contiguous(), rank))
            elif agreement.rank == rank:
                memory = torch.empty(tensors[place].shape, dtype=tensors[place].dtype, device=agreement.device)
                messages.append(agreement.message(dist.irecv, memory, source))
                received[place] = memory
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return {place: _laid_out_as(tensors[place], memory) for place, memory in received.items()}


def _tensors(parts: Sequence[FlatMicrobatch]) -> dict[Place, torch.Tensor]:
    return {(index, path): tensor for index, part in enumerate(parts) for path, tensor in part.tensors.items()}


def _laid_out_as(absent: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    if memory.stride() == absent.stride():
        return memory
    return torch.empty_like(absent, device=memory.device).copy_(memory)


def _name(place: Place) -> str:
    return f"{place[1]} of microbatch {place[0]}"
