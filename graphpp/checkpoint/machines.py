"""The machines of a job, by the folder that each has for itself, and messages that carry files between them.

Contract
--------
- Ranks are on one machine if they see one folder: each leaves a mark there, and looks for the marks of the others.
- A message goes from rank to rank of one replica, or from replica to replica of one rank: these have a process group.
- A file has its name when it is complete and on the disk.
- All methods are called by all ranks of all replicas, with equal arguments where these concern all ranks. Errors of a rank's
  own files are `CheckpointError` on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from graphpp.errors import CheckpointError, GraphPPError

T = TypeVar("T")
_MESSAGE = 2**28  # bytes
INCOMING = ".incoming"  # the end of the name of a file that is not complete


class MeshRank(NamedTuple):
    """A rank of the pipeline in one of the replicas."""

    replica: int
    rank: int


class Transfer(NamedTuple):
    """A file, by its path within the folders of both machines, its bytes, and who sends it to whom."""

    file: str
    bytes: int
    source: MeshRank
    target: MeshRank


Stored = Mapping[MeshRank, Mapping[str, int]]  # the bytes of each file that the machine of a rank has


@dataclass(frozen=True)
class Machines:
    """The machines of all ranks. `ranks`, `replicas`: gloo groups, or None for a single one; `folder`: of this machine."""

    ranks: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    folder: Path

    @property
    def own(self) -> MeshRank:
        """This process."""
        return MeshRank(_index(self.replicas), _index(self.ranks))

    def gathered(self, value: T) -> dict[MeshRank, T]:
        """The values of all ranks, in order."""
        rows = _gathered(_gathered(value, self.ranks), self.replicas)
        return {MeshRank(replica, rank): each for replica, row in enumerate(rows) for rank, each in enumerate(row)}

    def agreed(self, work: Callable[[], object]) -> None:
        """Do `work` with this machine's files on every rank, and go on when all have done it; raise on all where one cannot."""
        fault: Exception | None = None
        try:
            work()
        except (OSError, RuntimeError, GraphPPError) as error:  # torch raises RuntimeError for files
            fault = error
        faults = self.gathered(None if fault is None else _words(fault))
        first = next(((rank, text) for rank, text in faults.items() if text is not None), None)
        if first is not None:
            (replica, rank), text = first
            raise CheckpointError(f"replica {replica}, rank {rank}: {text}") from fault

    def once_per_machine(self, work: Callable[[], object]) -> None:
        """As `agreed`, with `work` on the first rank of each machine alone."""
        self.agreed(work if self.of[self.own] == self.own else lambda: None)

    # ------------------------------------------------------------------------------------------------ who is where

    @cached_property
    def _marks(self) -> dict[MeshRank, str]:
        return self.gathered(f".{uuid4().hex}")

    @property
    def name(self) -> str:
        """A random name of 32 letters and digits, equal on all ranks."""
        return self._marks[MeshRank(0, 0)].removeprefix(".")

    @cached_property
    def of(self) -> dict[MeshRank, MeshRank]:
        """For each rank the first rank of its machine."""
        own = self.folder / self._marks[self.own]

        def mark() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            own.touch()

        self.agreed(mark)
        first = next(rank for rank, name in self._marks.items() if (self.folder / name).exists())
        found = self.gathered(first)
        own.unlink()
        return found

    def twins(self, rank: MeshRank) -> list[MeshRank]:
        """The same rank of all replicas, which hold the same stages, in order."""
        return [each for each in self.of if each.rank == rank.rank]

    def on_next_machine(self, rank: MeshRank) -> list[MeshRank]:
        """The ranks of the same replica on the machine after the rank's; none where the replica is on one machine."""
        machines: dict[MeshRank, list[MeshRank]] = {}
        for each, machine in self.of.items():
            if each.replica == rank.replica:
                machines.setdefault(machine, []).append(each)
        order = list(machines)
        after = order[(order.index(self.of[rank]) + 1) % len(order)]
        return machines[after] if len(order) > 1 else []

    # ------------------------------------------------------------------------------------------------ messages

    def bring(self, wanted: Mapping[MeshRank, Iterable[str]], stored: Stored) -> None:
        """Send files, until each machine has those that its ranks want. Every wanted file is on a machine."""
        for transfers in self.transfers(wanted, stored):
            own = [each for each in transfers if self.own in (each.source, each.target)]
            contents: list[torch.Tensor] = []
            self.agreed(partial(self._open, own, contents))
            self._exchange(own, contents)
            self.agreed(partial(self._name, own))

    def transfers(self, wanted: Mapping[MeshRank, Iterable[str]], stored: Stored) -> tuple[list[Transfer], list[Transfer]]:
        """The messages of `bring`, in two rounds: across replicas, then within them."""
        has: dict[MeshRank, dict[str, int]] = {machine: {} for machine in self.of.values()}
        for rank, found in stored.items():
            has[self.of[rank]].update(found)
        pairs = ((rank, file) for rank, files in wanted.items() for file in files)
        lacking = sorted((rank, file) for rank, file in pairs if file not in has[self.of[rank]])

        def holders(file: str) -> list[MeshRank]:
            return [rank for rank, machine in self.of.items() if file in has[machine]]

        across: dict[tuple[MeshRank, str], Transfer] = {}  # by machine and file
        for rank, file in lacking:
            sources = holders(file)
            if not sources:
                raise CheckpointError(f"{file} is on no machine of this job")
            if all(each.replica != rank.replica for each in sources):
                twin = next((each for each in sources if each.rank == rank.rank), sources[0])
                target = MeshRank(rank.replica, twin.rank)
                across.setdefault((self.of[target], file), Transfer(file, has[self.of[twin]][file], twin, target))
        for machine, file in across:
            has[machine][file] = across[machine, file].bytes
        within: dict[tuple[MeshRank, str], Transfer] = {}
        for rank, file in lacking:
            machine = self.of[rank]
            if file not in has[machine]:
                near = [each for each in holders(file) if each.replica == rank.replica]
                source = near[len(within) % len(near)]  # all ranks of a machine send
                within.setdefault((machine, file), Transfer(file, has[self.of[source]][file], source, rank))
        return list(across.values()), list(within.values())

    def _open(self, transfers: Iterable[Transfer], contents: list[torch.Tensor]) -> None:
        """Map the files that this rank sends or receives into memory; those that it receives are made, with all their bytes."""
        for each in transfers:
            sends = self.own == each.source
            path = self.folder / each.file if sends else self._incoming(each)
            if not sends:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    if each.bytes and hasattr(os, "posix_fallocate"):  # a write into mapped memory could not raise
                        os.posix_fallocate(file.fileno(), 0, each.bytes)
            empty = torch.empty(0, dtype=torch.uint8)
            contents.append(torch.from_file(str(path), not sends, each.bytes, dtype=torch.uint8) if each.bytes else empty)

    def _exchange(self, transfers: Iterable[Transfer], contents: Iterable[torch.Tensor]) -> None:
        """Send and receive the contents of files. Messages between two ranks arrive in order."""
        works = list[tuple[dist.Work | None, torch.Tensor]]()  # a work does not keep its tensor alive
        for each, content in zip(transfers, contents, strict=True):
            sends = self.own == each.source
            peer = each.target if sends else each.source
            within = peer.replica == self.own.replica
            group, index = (self.ranks, peer.rank) if within else (self.replicas, peer.replica)
            for part in content.split(_MESSAGE) if each.bytes else ():
                if sends:
                    works.append((dist.isend(part, group=group, group_dst=index), part))
                else:
                    works.append((dist.irecv(part, group=group, group_src=index), part))
        for work, _ in works:
            assert work is not None, "a message of a rank outside of its group"
            work.wait()

    def _name(self, transfers: Iterable[Transfer]) -> None:
        """Give the files that this rank has received their names."""
        for each in transfers:
            if each.target == self.own:
                path = self._incoming(each)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                path.rename(self.folder / each.file)

    def _incoming(self, transfer: Transfer) -> Path:
        path = self.folder / transfer.file
        return path.with_name(f"{path.name}{INCOMING}")


def _words(fault: Exception) -> str:
    return str(fault) if isinstance(fault, GraphPPError | OSError) else f"{type(fault).__name__}: {fault}"


def _index(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if group is None:
        return [value]
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found
