"""The machines of a job, identified by their own folders, and messages that carry files between them.

- Ranks are on one machine if they see one folder: each rank leaves a mark there and looks for the others' marks.
- A file gets its name only once it is complete and on disk.
- All ranks of all replicas call the methods, with equal arguments where these concern all ranks. A rank's file errors raise
  `CheckpointError` on all ranks.
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
INCOMING = ".incoming"  # suffix of incomplete files


class MeshRank(NamedTuple):
    """A rank of one replica: `rank` counts among the ranks that together have the model once."""

    replica: int
    rank: int


class Transfer(NamedTuple):
    """A file to send. `file`: its path within the folders of both machines; `bytes`: its size."""

    file: str
    bytes: int
    source: MeshRank
    target: MeshRank


Stored = Mapping[MeshRank, Mapping[str, int]]  # rank -> file on its machine -> bytes


@dataclass(frozen=True)
class Machines:
    """The machines of all ranks. `group`: gloo, all ranks of all replicas (None: one process); `folder`: this machine's own."""

    own: MeshRank
    group: dist.ProcessGroup | None
    folder: Path

    def gathered(self, value: T) -> dict[MeshRank, T]:
        found = [(self.own, value)]
        if self.group is not None:
            found *= dist.get_world_size(self.group)
            dist.all_gather_object(found, (self.own, value), self.group)
        return dict(sorted(found, key=lambda pair: pair[0]))

    def agreed(self, work: Callable[[], object]) -> None:
        """Run `work` on this machine's files on every rank, then wait for all; raise on all ranks if one fails."""
        fault: Exception | None = None
        try:
            work()
        except (OSError, RuntimeError, GraphPPError) as error:  # torch raises RuntimeError for files
            fault = error
        faults = self.gathered(None if fault is None else _words(fault))
        for (replica, rank), text in faults.items():
            if text is not None:
                raise CheckpointError(f"replica {replica}, rank {rank}: {text}") from fault

    def once_per_machine(self, work: Callable[[], object]) -> None:
        """As `agreed`, with `work` on only the first rank of each machine."""
        self.agreed(work if self.of[self.own] == self.own else lambda: None)

    @cached_property
    def _marks(self) -> dict[MeshRank, tuple[str, int]]:
        """Each rank's mark, and its number in the group."""
        return self.gathered((f".{uuid4().hex}", 0 if self.group is None else dist.get_rank(self.group)))

    @property
    def name(self) -> str:
        """A random name of 32 hexadecimal digits, equal on all ranks."""
        return self._marks[MeshRank(0, 0)][0].removeprefix(".")

    @cached_property
    def of(self) -> dict[MeshRank, MeshRank]:
        """For each rank, the first rank of its machine."""
        own = self.folder / self._marks[self.own][0]

        def mark() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            own.touch()

        self.agreed(mark)
        first = next(rank for rank, (name, _) in self._marks.items() if (self.folder / name).exists())
        found = self.gathered(first)
        own.unlink()
        return found

    def twins(self, rank: MeshRank) -> list[MeshRank]:
        """The same rank of all replicas (with the same stages), in order."""
        return [each for each in self.of if each.rank == rank.rank]

    def on_next_machine(self, rank: MeshRank) -> list[MeshRank]:
        """The ranks of the same replica on the next machine; empty if the replica is on one machine."""
        machines: dict[MeshRank, list[MeshRank]] = {}
        for each, machine in self.of.items():
            if each.replica == rank.replica:
                machines.setdefault(machine, []).append(each)
        order = list(machines)
        after = order[(order.index(self.of[rank]) + 1) % len(order)]
        return machines[after] if len(order) > 1 else []

    def bring(self, wanted: Mapping[MeshRank, Iterable[str]], stored: Stored) -> None:
        """Send files until each machine has those that its ranks want. Some machine must have each file."""
        own = [each for each in self.transfers(wanted, stored) if self.own in (each.source, each.target)]
        contents: list[torch.Tensor] = []
        self.agreed(partial(self._open, own, contents))
        self._exchange(own, contents)
        self.agreed(partial(self._name, own))

    def transfers(self, wanted: Mapping[MeshRank, Iterable[str]], stored: Stored) -> list[Transfer]:
        """The messages of `bring`: each file once to each machine that lacks it, preferably from the same replica."""
        has = self._by_machine(stored)
        pairs = sorted((rank, file) for rank, files in wanted.items() for file in files)
        found: dict[tuple[MeshRank, str], Transfer] = {}  # by machine and file
        for rank, file in pairs:
            machine = self.of[rank]
            if file not in has[machine] and (machine, file) not in found:
                sources = self._sources(rank, file, has)
                source = sources[len(found) % len(sources)]  # all ranks of a machine send
                found[machine, file] = Transfer(file, has[self.of[source]][file], source, rank)
        return list(found.values())

    def _by_machine(self, stored: Stored) -> dict[MeshRank, dict[str, int]]:
        has: dict[MeshRank, dict[str, int]] = {machine: {} for machine in self.of.values()}
        for rank, files in stored.items():
            has[self.of[rank]].update(files)
        return has

    def _sources(self, target: MeshRank, file: str, has: Mapping[MeshRank, Mapping[str, int]]) -> list[MeshRank]:
        """The ranks that may send a file to `target`; `has`: the files of each machine."""
        holders = [each for each, machine in self.of.items() if file in has[machine]]
        if not holders:
            raise CheckpointError(f"{file} is on no machine of this job")
        return [each for each in holders if each.replica == target.replica] or holders

    def _open(self, transfers: Iterable[Transfer], contents: list[torch.Tensor]) -> None:
        """Memory-map the files to send, and create and map the files to receive, in full size."""
        for each in transfers:
            sends = self.own == each.source
            path = self.folder / each.file if sends else self._incoming(each)
            if not sends:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    if each.bytes and hasattr(os, "posix_fallocate"):  # a later write into mapped memory cannot raise
                        os.posix_fallocate(file.fileno(), 0, each.bytes)
            empty = torch.empty(0, dtype=torch.uint8)
            contents.append(torch.from_file(str(path), not sends, each.bytes, dtype=torch.uint8) if each.bytes else empty)

    def _exchange(self, transfers: Iterable[Transfer], contents: Iterable[torch.Tensor]) -> None:
        """Send and receive the contents of files. Messages between two ranks arrive in order."""
        works = list[tuple[dist.Work | None, torch.Tensor]]()  # a `Work` does not keep its tensor alive
        for each, content in zip(transfers, contents, strict=True):
            for part in content.split(_MESSAGE) if each.bytes else ():
                if self.own == each.source:
                    works.append((dist.isend(part, group=self.group, group_dst=self._marks[each.target][1]), part))
                else:
                    works.append((dist.irecv(part, group=self.group, group_src=self._marks[each.source][1]), part))
        for work, _ in works:
            assert work is not None, "a message of a rank outside of its group"
            work.wait()

    def _name(self, transfers: Iterable[Transfer]) -> None:
        """Sync the received files to disk, and give them their names."""
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
