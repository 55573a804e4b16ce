"""A checkpoint in a folder of each machine, so that a restart reads no storage that the machines share.

Contract
--------
- Each rank writes its part into the folder of its own machine. Every part is on two machines: a replica has the same values, or
  `save` sends the part to the next machine of the pipeline.
- A save is published when the files of all machines are complete, and counts when every machine has published it. Only then is
  the save before removed. So machines that are lost at any moment leave one save, or two of one step each.
- `load` takes the newest save of which all files are on some machine, one for all replicas, and sends each machine the files
  that its ranks read. Ranks, stages, replicas, schedule and machines may be others than those of the save.
- The folder has `<save>/<replica>/` with the files of `torch.distributed.checkpoint`; every machine has the metadata.
- All methods are called by all ranks of all replicas. Errors are `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from graphpp._torch.checkpoint_files import write_entries
from graphpp.arguments import FLAG, checked
from graphpp.errors import CheckpointError
from graphpp.pipeline.checkpoint.background import PendingSave, host_copies, in_background
from graphpp.pipeline.checkpoint.restore import ENTRY, restore_from, told, without_os_errors
from graphpp.pipeline.checkpoint.safe_reading import METADATA, SafePlanner, SafeReader
from graphpp.pipeline.checkpoint.send_files import INCOMING, Seat, Seats
from graphpp.pipeline.checkpoint.training_state import TrainingState, check_not_saving

_LOG = logging.getLogger("graphpp")
_PARTIAL = ".partial"
_WORDS = "the local checkpoint"  # machines may call the folder differently


class LocalCheckpoint:
    """The training of a pipeline, to save in the machines' own folders and to load; made by `checkpoint.local`."""

    def __init__(self, state: TrainingState, folder: Path, mirror: bool) -> None:
        """`mirror`: whether a save is sent to the next machine."""
        self._state, self._calls, self._folder, self._mirror = state, state.calls, folder, mirror
        self._saves = 0

    def save(self) -> None:
        """Write this rank's part, and a copy on another machine. Called by all ranks, between an optimizer's step and the next.

        After an error the save before is still there.
        """
        entries, save = self._begin_save()
        with self._calls.watched():
            self._store(entries, save)

    def async_save(self) -> PendingSave:
        """Copy the training into the host's memory, and save it in the background. Called by all ranks.

        Call `wait` of the result before the next save or load.
        """
        entries, save = self._begin_save()
        copies = host_copies(entries)
        written = in_background(lambda: self._store(copies, save))
        self._calls.saving = str(self._folder)

        def end() -> None:
            self._calls.saving = None
            with self._calls.watched():
                written.result()

        return PendingSave(written, end)

    @checked(CheckpointError, missing_ok=FLAG)
    def load(self, *, missing_ok: bool = False) -> bool:
        """Restore the newest save that the machines have together. Called by all ranks.

        Returns True; with `missing_ok` False where there is none, so that the training goes on from a checkpoint on a disk.
        Raises `CheckpointError` for a save that is torn or does not fit this training.
        """
        parts: dict[str, _Part] = {}

        def look() -> None:
            for metadata in self._folder.glob(f"*/*/{METADATA}"):
                part = metadata.parent.relative_to(self._folder)
                if not part.parts[0].endswith(_PARTIAL):
                    parts[str(part)] = _Part.of(SafeReader(metadata.parent).read_metadata())

        self._begin(f"load {_WORDS}", look)
        with self._calls.watched():
            known = {part: about for each in self._seats.gathered(parts).values() for part, about in each.items()}
            self._first_of_machine_does(lambda: _link(_first_alike(known), self._folder))
            stored = self._seats.gathered(_files(self._folder, self._folder))
            found = _newest(known, set().union(*stored.values()))
            if found is not None:
                self._transfer({seat: [f"{found}/{METADATA}"] for seat in stored}, stored)
        if found is None and not missing_ok:
            raise CheckpointError(
                f"the machines of this job have no complete save in {self._folder} ({len(parts)} parts are on this one): "
                "load a checkpoint from a disk"
            )
        return restore_from(self._state, _WORDS, lambda: None if found is None else self._folder / found, self._provide)

    # ------------------------------------------------------------------------------------------------ inside

    @cached_property
    def _seats(self) -> Seats:
        return Seats(self._calls.file_group, self._calls.replica_file_group, self._folder)

    def _begin(
        self, what: str, work: Callable[[], None], alike: Callable[[], Mapping[str, list[str]]] | None = None
    ) -> None:
        """Do `work` on all ranks of all replicas, and learn which ranks share a machine."""

        def begin() -> None:
            check_not_saving(self._calls)
            self._seats.mark()
            work()

        self._calls.replicas_do(what, partial(self._calls.all_do, what, without_os_errors(begin), alike))
        with self._calls.watched():
            _ = self._seats.machine_of

    def _begin_save(self) -> tuple[dict[str, Any], str]:
        """This rank's entries, and the name of the save."""
        entries: dict[str, Any] = {}
        self._begin(f"save {_WORDS}", lambda: entries.update(self._state.entries()), self._state.alike)
        self._saves += 1
        return entries, f"{self._calls.steps:012}{self._seats.name}-{self._saves}"

    def _store(self, entries: dict[str, Any], save: str) -> None:
        """Write, exchange and publish a save."""
        folder, unpublished = self._folder, f"{save}{_PARTIAL}"
        part = folder / unpublished / str(self._seats.own.replica)
        self._first_of_machine_does(lambda: _keep_only(_saves(folder), folder))
        self._seats.agreed(lambda: self._write(entries, part))
        self._exchange_parts(unpublished)
        self._first_of_machine_does(lambda: (folder / unpublished).rename(folder / save))
        self._first_of_machine_does(lambda: _keep_only([save], folder))

    def _first_of_machine_does(self, work: Callable[[], object]) -> None:
        self._seats.agreed(work if self._seats.first_of_machine else lambda: None)

    def _write(self, entries: dict[str, Any], folder: Path) -> None:
        with told():
            write_entries({ENTRY: entries}, FileSystemWriter(folder), self._calls.file_group)

    def _exchange_parts(self, save: str) -> None:
        """Give every machine the metadata, and the files of the machine before it."""
        stored = self._seats.gathered(_files(self._folder / save / str(self._seats.own.replica), self._folder))
        wanted = {seat: {f"{save}/{seat.replica}/{METADATA}"} for seat in stored}
        after = {seat: self._seats.on_next_machine(seat) for seat in stored} if self._mirror else {}
        for seat, targets in after.items():
            for number, file in enumerate(sorted(stored[seat]) if targets else ()):
                wanted[targets[number % len(targets)]].add(file)
        if self._mirror and self._saves == 1 and not any(after.values()):
            _LOG.warning("all ranks share the folder %s, so its saves outlive the processes, but not the machine", self._folder)
        self._transfer(wanted, stored)

    def _provide(self, folder: Path, entries: dict[str, Any]) -> None:
        """Fetch the files with the entries that this rank reads next."""
        needed: set[str] = set()

        def plan() -> None:
            metadata, planner = SafeReader(folder).read_metadata(), SafePlanner(folder)
            planner.set_up_planner(entries, metadata)
            places = (metadata.storage_data[item.storage_index].relative_path for item in planner.create_local_plan().items)
            needed.update(str((folder / place).relative_to(self._folder)) for place in places)

        with self._calls.watched():
            self._seats.agreed(plan)
            self._transfer(self._seats.gathered(needed), self._seats.gathered(_files(folder, self._folder)))

    def _transfer(self, wanted: Mapping[Seat, Iterable[str]], stored: Mapping[Seat, Mapping[str, int]]) -> None:
        """Send files to the machines whose ranks want them. `stored`: the bytes of each file of a rank's machine."""
        for transfers in self._seats.transfers(wanted, stored):
            self._seats.agreed(partial(self._seats.allocate, transfers))
            self._seats.send(transfers)
            self._seats.agreed(lambda: None)  # all files have their names


def _saves(folder: Path) -> list[str]:
    """The published saves of a machine."""
    return [each.name for each in folder.iterdir() if each.is_dir() and not each.name.endswith(_PARTIAL)]


def _keep_only(saves: Collection[str], folder: Path) -> None:
    """Remove all saves but these."""
    for each in folder.iterdir():
        if each.is_dir() and each.name not in saves:
            shutil.rmtree(each)


def _files(within: Path, folder: Path) -> dict[str, int]:
    """The bytes of all complete files in `within`, by path in `folder`."""
    files = (file for file in within.rglob("*") if file.is_file() and file.suffix != INCOMING)
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


@dataclass(frozen=True)
class _Part:
    """What a replica has written in a save: the names of its files, and a digest of which entry is where in them."""

    names: frozenset[str]
    layout: str

    @classmethod
    def of(cls, metadata: Metadata) -> _Part:
        """The part that this metadata describes."""
        places = [(str(index), place) for index, place in (metadata.storage_data or {}).items()]
        lines = sorted(f"{index} {place.relative_path} {place.offset} {place.length}" for index, place in places)
        names = frozenset({METADATA, *(place.relative_path for _, place in places)})
        return cls(names, hashlib.sha256("\n".join(lines).encode()).hexdigest())


def _save_of(part: str) -> str:
    return part.partition("/")[0]


def _first_alike(known: Mapping[str, _Part]) -> dict[str, str]:
    """For each part the first of the same save with equal files: replicas have the same values."""
    first: dict[tuple[str, _Part], str] = {}
    for part in sorted(known):
        first.setdefault((_save_of(part), known[part]), part)
    return {part: first[_save_of(part), known[part]] for part in known}


def _link(alike: Mapping[str, str], folder: Path) -> None:
    """Let a machine have its files under the name of the first part with equal files."""
    for part, first in alike.items():
        for file in (folder / part).iterdir() if part != first and (folder / part).exists() else ():
            target = folder / first / file.name
            if not target.exists() and file.suffix != INCOMING:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)


def _newest(known: Mapping[str, _Part], files: Collection[str]) -> str | None:
    """The first complete part of the newest save that has one; `files` are on any machine."""
    complete = [part for part, about in known.items() if all(f"{part}/{name}" in files for name in about.names)]
    return min((part for part in complete if _save_of(part) == max(map(_save_of, complete))), default=None)
