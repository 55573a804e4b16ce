"""Compare the data that the ranks of a pipeline were given, and send data to ranks that need them and were not given them.

Contract
--------
- Ranks of one pipeline must be given the same data. `checksums` has one number for each tensor, of all elements, in the first
  calls and then in every n-th. In between data are not compared: a checksum of a tensor on a GPU makes the host wait.
- A tensor on the meta device stands for data that a rank was not given. `holdings_of_ranks` raises `BatchError` on all ranks
  if a rank reads data that no rank has; `filled` gives each rank the data that its stages read, from the lowest rank that has
  them.
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
from graphpp.parallel.checksum import checksum
from graphpp.parallel.facts import Facts

_FIRST = 3  # calls of which all elements are compared

Place = tuple[int, str]  # the index of a microbatch and the path of a tensor in it
Tensors = dict[Place, torch.Tensor]


def checksums(parts: Sequence[FlatMicrobatch], call: int, every: int) -> dict[str, int | None]:
    """The checksums of a call's tensors by name, None for an absent one.

    `call`: the number of the call among its kind, from 1. `every`: data are compared in every so many calls; 0: never.
    """
    return {_name(place): total for place, total in _sums(_tensors(parts), call, every).items()}


def _sums(tensors: Tensors, call: int, every: int) -> dict[Place, int | None]:
    compared = every > 0 and (call <= _FIRST or call % every == 0)
    absent = {place: None for place, tensor in tensors.items() if tensor.is_meta}
    return absent | {place: checksum(tensor) for place, tensor in tensors.items() if compared and not tensor.is_meta}


class _Holding(NamedTuple):
    """The facts of one rank about one tensor: whether data were given, whether a stage reads them, and their checksum."""

    given: bool
    read: bool
    checked: bool
    total: int


Holdings = dict[Place, list[_Holding]]  # by rank of the pipeline


def holdings_of_ranks(
    parts: Sequence[FlatMicrobatch], read: Collection[str], call: int, every: int, agreement: Agreement
) -> Holdings:
    """The facts of all ranks about each tensor, by rank. Called by all ranks, with tensors alike in shape and dtype.

    `read`: the paths that this rank's stages read. `call`, `every`: as for `checksums`. Raises on all ranks: `MismatchError`
    where ranks were given different data, and `BatchError` where no rank was given data that a rank reads.
    """
    tensors = _tensors(parts)
    sums = _sums(tensors, call, every)
    own = [
        (not tensor.is_meta, place[1] in read, sums.get(place) is not None, sums.get(place) or 0)
        for place, tensor in tensors.items()
    ]
    everyone = agreement.of_all(torch.tensor(own, dtype=torch.int64, device="cpu"))
    holdings = {place: [_Holding(*row) for row in everyone[:, at].tolist()] for at, place in enumerate(tensors)}
    _check(holdings, agreement)
    return holdings


def filled(parts: Sequence[FlatMicrobatch], holdings: Holdings, agreement: Agreement) -> list[FlatMicrobatch]:
    """The microbatches with all tensors that this rank reads. Called by all ranks, with their common `holdings`."""
    received = _exchanged(_tensors(parts), holdings, agreement)
    pairs = [list(zip(part.paths, part.values, strict=True)) for part in parts]
    values = [tuple(received.get((index, path), leaf) for path, leaf in each) for index, each in enumerate(pairs)]
    return [replace(part, values=new) for part, new in zip(parts, values, strict=True)]


def _check(holdings: Holdings, agreement: Agreement) -> None:
    """Raise on all ranks where ranks hold different data, or a rank reads data that no rank was given."""
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


def _exchanged(tensors: Tensors, holdings: Holdings, agreement: Agreement) -> Tensors:
    """The tensors that this rank has received: each from the lowest rank that was given it, on every rank that lacks it."""
    received: Tensors = {}
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


def _tensors(parts: Sequence[FlatMicrobatch]) -> Tensors:
    return {(index, path): tensor for index, part in enumerate(parts) for path, tensor in part.tensors.items()}


def _laid_out_as(absent: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    if memory.stride() == absent.stride():
        return memory
    return torch.empty_like(absent, device=memory.device).copy_(memory)


def _name(place: Place) -> str:
    return f"{place[1]} of microbatch {place[0]}"
