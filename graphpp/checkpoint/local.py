"""Checkpoints in a folder of each machine, so that a restart reads no shared storage.

- Each rank writes its part to its machine's folder. Unless the caller decides otherwise, a part that no replica has on another
  machine is also sent to the pipeline's next machine.
- A save is published once all machines have complete files, and counts once all machines have published it; only then is the
  previous save removed. Losing a machine at any moment leaves a complete save.
- `load` takes the newest save whose files are all on some machine, and sends each machine the files that its ranks read. Ranks,
  stages, replicas, schedule and machines may differ from those of the save.
- All ranks of all replicas call the methods. Errors are `CheckpointError`, and `RankFailure` for a lost rank.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from graphpp._torch.checkpoint_files import NamedWriter, write_entries
from graphpp.arguments import FLAG, checked
from graphpp.checkpoint.find_saves import (
    PARTIAL,
    Part,
    Saves,
    files_in,
    keep_only,
    link,
    name_of_save,
    number_of,
    parts_in,
    save_of,
    saves_in,
    training_of,
)
from graphpp.checkpoint.in_progress import METADATA, PendingSave, host_copies, in_background
from graphpp.checkpoint.machines import Machines, MeshRank
from graphpp.checkpoint.restore import ALLOWED, ENTRY, restore_from, told
from graphpp.checkpoint.safe_reading import SafePlanner, SafeReader
from graphpp.checkpoint.training_state import TrainingState, check_not_saving
from graphpp.errors import CheckpointError
from graphpp.log import logger

_LOG = logger(__name__)
_NAME_IN_ERRORS = "the local checkpoint"  # the folder's path may differ between machines
_LITTLE = 2**16  # bytes; a disk with less free space counts as full


class LocalCheckpoint:
    """A pipeline's training state in the machines' own folders; made by `checkpoint.local`."""

    def __init__(self, state: TrainingState, own: MeshRank, folder: Path, mirror: bool | None) -> None:
        """`mirror`: whether parts are sent to the next machine; None: parts that no replica has on another machine."""
        self._state, self._calls, self._own, self._folder, self._mirror = state, state.calls, own, folder, mirror
        self._known = set[str]()  # saves in the folder that this run wrote, loaded, or found to be none to load
        self._last: str | None = None  # the last save that this run loaded or published
        self._number = 0

    def save(self) -> None:
        """Write this rank's part, and a copy on another machine. Called by all ranks, between an optimizer step and the next.

        After an error the previous save is intact. Raises `CheckpointError` if the folder has saves of another training.
        """
        entries, save = self._begin_save(copied=False)
        with self._calls.watched():
            self._store(entries, save)

    def async_save(self) -> PendingSave:
        """Copy the training to host memory; write, send and publish the save in the background. Called by all ranks.

        Call `wait` of the result before the next save or load: it raises the error of a failed save.
        """
        entries, save = self._begin_save(copied=True)
        written = in_background(lambda: self._store(entries, save))
        self._calls.saving = str(self._folder)

        def end() -> None:
            self._calls.saving = None
            with self._calls.watched():
                written.result()

        return PendingSave(written, end)

    @checked(CheckpointError, missing_ok=FLAG, allow=ALLOWED)
    def load(self, *, missing_ok: bool = False, allow: str | Collection[str] = ()) -> bool:
        """Restore the newest complete save. Called by all ranks. Returns True, or with `missing_ok` False if there is none.

        Raises `CheckpointError` for a save that does not fit this training (but for `allow`, as in `Checkpoint.load`), and for
        saves of several trainings.
        """
        with self._beginning("load"):
            pass
        machines, folder = self._machines, self._folder
        with self._calls.watched():
            parts, files, seen = dict[str, Part](), dict[str, int](), list[str]()

            def look() -> None:
                parts.update(parts_in(folder))
                seen.extend(saves_in(folder))
                for save in seen:
                    files.update(files_in(folder / save, folder))

            machines.agreed(look)
            saves = Saves(machines.gathered(parts), machines.gathered(files))
            found = saves.newest(machines.own.replica)
            if found is not None:
                self._bring_together(found, saves, seen)
        if found is None and not missing_ok:
            raise CheckpointError(
                f"the machines of this job have no complete save in {folder} ({len(parts)} parts are on this one): load a "
                "checkpoint from a disk"
            )
        part = None if found is None else folder / found[0]
        loaded = restore_from(self._state, _NAME_IN_ERRORS, lambda: part, self._fetch_files, allow)
        self._known.update(seen)
        if found is not None:
            self._last = save_of(found[0])
            self._known.add(self._last)
            self._number = number_of(self._last)
        return loaded

    @cached_property
    def _machines(self) -> Machines:
        return Machines(self._own, self._calls.file_group_of_all, self._folder)

    @contextmanager
    def _beginning(self, what: str) -> Iterator[dict[str, Sequence[str]]]:
        """`Calls.all_ranks` for all replicas; afterwards the ranks of each machine are known."""
        words, calls = f"{what} {_NAME_IN_ERRORS}", self._calls
        with calls.all_replicas(words), calls.all_ranks(words, {"mirror": [str(self._mirror)]}) as alike:
            check_not_saving(calls)
            yield alike
        with calls.watched():
            _ = self._machines.of

    def _begin_save(self, *, copied: bool) -> tuple[dict[str, Any], str]:
        """This rank's entries (the model's memory, or host copies of it), and the name of the save."""
        with self._beginning("save") as alike:
            own = self._state.entries()
            entries = host_copies(own) if copied else own
            alike.update(self._state.alike())
        self._number += 1
        training = self._machines.name if self._last is None else training_of(self._last)
        return entries, name_of_save(self._calls.steps, self._number, training, self._machines.name)

    def _store(self, entries: dict[str, Any], save: str) -> None:
        machines, folder, unpublished = self._machines, self._folder, f"{save}{PARTIAL}"
        part = folder / unpublished / str(machines.own.replica)
        machines.once_per_machine(self._make_place)
        self._known.update((save, unpublished))
        try:
            machines.agreed(lambda: self._write(entries, part))
            self._copy_to_other_machines(unpublished)
            machines.once_per_machine(lambda: (folder / unpublished).rename(folder / save))
        except BaseException:
            shutil.rmtree(folder / unpublished, ignore_errors=True)
            raise
        self._last = save
        machines.once_per_machine(lambda: keep_only([save], folder, self._known))

    def _make_place(self) -> None:
        """Remove all saves of this training but the last."""
        self._folder.mkdir(parents=True, exist_ok=True)
        others = [save for save in saves_in(self._folder) if not save.endswith(PARTIAL) and save not in self._known]
        if others:
            raise CheckpointError(
                f"{self._folder} has saves that this run has not loaded, {others[-1]} for one: load them, remove them, or give "
                "this training a folder of its own"
            )
        keep_only([self._last] if self._last is not None else [], self._folder, self._known)

    def _write(self, entries: dict[str, Any], folder: Path) -> None:
        name = hashlib.sha256(folder.parent.name.encode()).hexdigest()[:16]  # equal in all parts of the save
        try:
            with told():
                write_entries({ENTRY: entries}, NamedWriter(folder, name), self._calls.file_group)
        except CheckpointError as fault:
            free = shutil.disk_usage(self._folder).free
            if free < _LITTLE:
                raise CheckpointError(f"{self._folder} is full, and needs room for two saves: {fault}") from fault
            raise

    def _copy_to_other_machines(self, save: str) -> None:
        """Give every machine the metadata, and the next machine the files that no other machine would have."""
        machines = self._machines
        stored = machines.gathered(files_in(self._folder / save / str(machines.own.replica), self._folder))
        wanted = {rank: {f"{save}/{rank.replica}/{METADATA}"} for rank in stored}
        alone = False
        for rank in machines.of:
            if not self._sends(rank):
                continue
            targets = machines.on_next_machine(rank)
            for number, file in enumerate(sorted(stored[rank]) if targets else ()):
                wanted[targets[number % len(targets)]].add(file)
            alone = alone or not targets
        if alone and self._number == 1:
            _LOG.warning(
                "the saves in %s outlive the processes, but not the machine: the ranks of the pipeline share it, and no "
                "replica is on another one",
                self._folder,
            )
        machines.bring(wanted, stored)

    def _sends(self, rank: MeshRank) -> bool:
        """Whether a rank's part is sent to the next machine; of replicas on one machine the first sends."""
        machines = self._machines
        twins = machines.twins(rank)
        here = [each for each in twins if machines.of[each] == machines.of[rank]]
        copied = len({machines.of[each] for each in twins}) > 1
        return here[0] == rank and (self._mirror or (self._mirror is None and not copied))

    def _bring_together(self, found: tuple[str, list[str]], saves: Saves, seen: Collection[str]) -> None:
        """Give every machine the metadata of the part that its ranks read, and remove all other saves that were seen."""
        machines, folder = self._machines, self._folder
        part, parts = found
        machines.once_per_machine(lambda: keep_only([save_of(part)], folder, seen))
        machines.once_per_machine(lambda: link(parts, saves.files[machines.own], folder))
        machines.bring(machines.gathered([f"{part}/{METADATA}"]), saves.files)

    def _fetch_files(self, part: Path, entries: dict[str, Any]) -> None:
        """Fetch the files of the entries that this rank reads next."""
        needed: set[str] = set()
        stored: dict[str, int] = {}

        def plan() -> None:
            metadata, planner = SafeReader(part).read_metadata(), SafePlanner(part)
            planner.set_up_planner(entries, metadata)
            places = (metadata.storage_data[item.storage_index].relative_path for item in planner.create_local_plan().items)
            needed.update(str((part / place).relative_to(self._folder)) for place in places)
            written = Part.of(metadata)
            stored.update((file, size) for file, size in files_in(part, self._folder).items() if written.is_whole(file, size))

        with self._calls.watched():
            self._machines.agreed(plan)
            self._machines.bring(self._machines.gathered(needed), self._machines.gathered(stored))
