"""Send files between the machines of a job.

Contract
--------
- A seat is a rank of a replica of the pipeline. A message goes from rank to rank of one replica, or from replica to replica of
  one rank: those have a process group.
- Ranks are on one machine if they see one folder. A file of a machine is read and written by any of its ranks.
- All functions are called by all seats, with arguments that are equal where they are not the seat's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from graphpp.errors import CheckpointError, GraphPPError

T = TypeVar("T")
_MESSAGE = 2**28  # bytes
INCOMING = ".incoming"  # the end of the name of a file that is not complete


class Seat(NamedTuple):
    """A rank of a replica."""

    replica: int
    rank: int


class Transfer(NamedTuple):
    """A file, by its path within the folders of both machines, its bytes, and who sends it to whom."""

    file: str
    bytes: int
    source: Seat
    target: Seat


@dataclass(frozen=True)
class Seats:
    """All seats of a job. `ranks`, `replicas`: process groups on CPU, or None for a single one; `folder`: this machine's."""

    ranks: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    folder: Path

    @property
    def own(self) -> Seat:
        """The seat of this process."""
        return Seat(_index(self.replicas), _index(self.ranks))

    def gathered(self, value: T) -> dict[Seat, T]:
        """The values of all seats, in order."""
        rows = _gathered(_gathered(value, self.ranks), self.replicas)
        return {Seat(replica, rank): each for replica, row in enumerate(rows) for rank, each in enumerate(row)}

    def agreed(self, work: Callable[[], object]) -> None:
        """Do `work` at every seat, and go on when all have done it. Raises `CheckpointError` at all seats if one cannot."""
        fault: Exception | None = None
        try:
            work()
        except (OSError, GraphPPError) as error:
            fault = error
        faults = self.gathered(None if fault is None else str(fault))
        first = next(((seat, text) for seat, text in faults.items() if text is not None), None)
        if first is not None:
            seat, text = first
            raise CheckpointError(f"replica {seat.replica}, rank {seat.rank}: {text}") from fault

    @cached_property
    def _mark(self) -> Path:
        return self.folder / f".{uuid4().hex}"

    def mark(self) -> None:
        """Make the folder and leave a mark, by which ranks of one machine find each other. Raises `OSError`."""
        if "_marks" not in vars(self):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._mark.touch()

    @cached_property
    def _marks(self) -> dict[Seat, str]:
        return self.gathered(self._mark.name)

    @property
    def name(self) -> str:
        """A random name, equal on all seats."""
        return self._marks[Seat(0, 0)]

    @cached_property
    def machine_of(self) -> dict[Seat, Seat]:
        """For each seat the first seat of its machine. All seats have called `mark`."""
        first = next(seat for seat, name in self._marks.items() if (self.folder / name).exists())
        found = self.gathered(first)
        self._mark.unlink()
        return found

    @property
    def first_of_machine(self) -> bool:
        """Whether this seat is the first of its machine."""
        return self.machine_of[self.own] == self.own

    def on_next_machine(self, seat: Seat) -> list[Seat]:
        """The seats of the same replica on the machine after the seat's; none where the replica is on one machine."""
        machines: dict[Seat, list[Seat]] = {}
        for each, machine in self.machine_of.items():
            if each.replica == seat.replica:
                machines.setdefault(machine, []).append(each)
        order = list(machines)
        after = order[(order.index(self.machine_of[seat]) + 1) % len(order)]
        return machines[after] if len(order) > 1 else []

    def transfers(
        self, wanted: Mapping[Seat, Iterable[str]], stored: Mapping[Seat, Mapping[str, int]]
    ) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers after which the machine of each seat has the files that the seat wants, in two rounds.

        `stored`: the bytes of each file that a seat's machine has; every wanted file is on a machine. The first round is across
        replicas, because a message cannot go to another rank of another replica.
        """
        has: dict[Seat, set[str]] = {machine: set() for machine in self.machine_of.values()}
        size: dict[str, int] = {}
        for seat, found in stored.items():
            has[self.machine_of[seat]].update(found)
            size.update(found)
        pairs = ((seat, file) for seat, files in wanted.items() for file in files)
        lacking = sorted((seat, file) for seat, file in pairs if file not in has[self.machine_of[seat]])

        def holders(file: str) -> list[Seat]:
            return [seat for seat, machine in self.machine_of.items() if file in has[machine]]

        across: list[Transfer] = []
        for seat, file in lacking:
            sources = holders(file)
            if all(each.replica != seat.replica for each in sources):
                twin = next((each for each in sources if each.rank == seat.rank), sources[0])
                target = Seat(seat.replica, twin.rank)
                across.append(Transfer(file, size[file], twin, target))
                has[self.machine_of[target]].add(file)
        within: dict[tuple[Seat, str], Transfer] = {}  # by machine and file
        for seat, file in lacking:
            key = self.machine_of[seat], file
            if file not in has[key[0]] and key not in within:
                near = [each for each in holders(file) if each.replica == seat.replica]
                source = near[len(within) % len(near)]  # all ranks of a machine send
                within[key] = Transfer(file, size[file], source, seat)
        return across, list(within.values())

    def allocate(self, transfers: Iterable[Transfer]) -> None:
        """Make room for the files that this seat receives. Raises `OSError` where the folder has too little."""
        for each in transfers:
            if each.target == self.own:
                path = self._incoming(each)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    if each.bytes and hasattr(os, "posix_fallocate"):  # a write into mapped memory could not raise
                        os.posix_fallocate(file.fileno(), 0, each.bytes)

    def send(self, transfers: Iterable[Transfer]) -> None:
        """Send files into the room that `allocate` has made; a file has its name when it is complete."""
        transfers = list(transfers)
        works = list[tuple[dist.Work | None, torch.Tensor]]()  # a work does not keep its tensor alive
        for tag, each in enumerate(transfers):
            if each.bytes and self.own in (each.source, each.target):
                sends = self.own == each.source
                peer = each.target if sends else each.source
                within = peer.replica == self.own.replica
                group, index = (self.ranks, peer.rank) if within else (self.replicas, peer.replica)
                path = self.folder / each.file if sends else self._incoming(each)
                content = torch.from_file(str(path), not sends, each.bytes, dtype=torch.uint8)
                for part in content.split(_MESSAGE):
                    if sends:
                        works.append((dist.isend(part, group=group, tag=tag, group_dst=index), part))
                    else:
                        works.append((dist.irecv(part, group=group, tag=tag, group_src=index), part))
        for work, _ in works:
            assert work is not None, "a message of a rank outside of its group"
            work.wait()
        for each in transfers:
            if each.target == self.own:
                self._incoming(each).rename(self.folder / each.file)

    def _incoming(self, transfer: Transfer) -> Path:
        path = self.folder / transfer.file
        return path.with_name(f"{path.name}{INCOMING}")


def _index(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if group is None:
        return [value]
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found
