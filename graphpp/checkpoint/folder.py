"""A checkpoint folder: written completely or not at all, read by any layout of ranks.

- `save` writes into `<folder>.partial` and renames once all ranks have written. During the exchange the previous checkpoint is
  named `<folder>.before`, and `load` reads it if `<folder>` is missing, so a process killed at any moment leaves the old or the
  new checkpoint.
- The files are those of `torch.distributed.checkpoint`, readable by `dcp.load`. All ranks see one file system.
- `load` runs no code that a file names (`safe_reading.py`); a checkpoint that does not fit changes nothing (`restore.py`).
- A folder that is no checkpoint is never replaced. Of several replicas the first writes.
- Errors are `CheckpointError` on all ranks; if only one rank fails, the others raise `MismatchError`.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from graphpp._torch.checkpoint_files import write_entries
from graphpp.arguments import FLAG, PATH, checked, or_none
from graphpp.checkpoint.background import PendingSave, host_copies, in_background
from graphpp.checkpoint.local import LocalCheckpoint
from graphpp.checkpoint.machines import MeshRank
from graphpp.checkpoint.restore import ENTRY, restore_from, told, without_os_errors
from graphpp.checkpoint.safe_reading import METADATA
from graphpp.checkpoint.training_state import TrainingState, check_not_saving
from graphpp.errors import CheckpointError
from graphpp.parallel.rank_place import RankPlace


class Checkpoint:
    """A pipeline's training state, to save and to load; made by `pipe.checkpoint`.

    It is a `Stateful`, so `dcp.save({"training": checkpoint}, checkpoint_id=folder)` works too.
    """

    def __init__(self, state: TrainingState, place: RankPlace) -> None:
        self._state, self._calls, self._place = state, state.calls, place
        self._writes = place.writes_files

    @property
    def extra(self) -> dict[str, Any]:
        """The values that the caller gave; after `load`, the checkpoint's values."""
        return self._state.extra

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries, by names that do not depend on ranks, stages or schedule."""
        return self._state.entries()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's entries. Raises `CheckpointError` if the state of an optimizer is missing."""
        self._state.restore(state)

    @checked(CheckpointError, folder=PATH)
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint. Called by all ranks. If it fails or is killed, the folder has the previous checkpoint."""
        path = self._path(folder)
        with self._calls.all_replicas(f"checkpoint {path}"):
            if self._writes:
                entries = self._read(path)
                with self._calls.watched(), told():
                    write_entries({ENTRY: entries}, FileSystemWriter(_partial(path)), self._calls.file_group)
                self._publish(path)

    @checked(CheckpointError, folder=PATH)
    def async_save(self, folder: str | os.PathLike[str]) -> PendingSave:
        """Copy the training to host memory and write it in the background. Called by all ranks.

        Call `wait` of the result before the next save or load.
        """
        path = self._path(folder)
        written: list[Future[Any]] = []

        def end() -> None:
            self._calls.saving = None
            with self._calls.all_replicas(f"checkpoint {path} is complete"):
                for each in written:
                    with self._calls.watched(), told():
                        each.result()
                    self._publish(path)

        with self._calls.all_replicas(f"checkpoint {path}"):
            if self._writes:
                entries = {ENTRY: self._read(path, copied=True)}
                writer, group = FileSystemWriter(_partial(path)), self._calls.file_group
                written.append(in_background(lambda: write_entries(entries, writer, group)))
        self._calls.saving = str(path)
        return PendingSave(written[0] if written else None, end)

    @checked(CheckpointError, folder=PATH, missing_ok=FLAG)
    def load(self, folder: str | os.PathLike[str], *, missing_ok: bool = False) -> bool:
        """Read a checkpoint written by any layout of ranks, stages and schedule. Called by all ranks.

        Returns True; with `missing_ok` False if no save into `folder` has completed yet. Raises `CheckpointError` on all ranks
        if the folder is damaged or does not fit this training.
        """
        path = self._path(folder)

        def find() -> Path | None:
            empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
            return None if missing_ok and empty and not _before(path).exists() else complete(path)

        return restore_from(self._state, f"the checkpoint in {path}", find)

    @checked(CheckpointError, folder=PATH, mirror=or_none(FLAG))
    def local(self, folder: str | os.PathLike[str], *, mirror: bool | None = None) -> LocalCheckpoint:
        """Save and load this training in a folder of each machine, in memory (`/dev/shm/run`) or on a local disk.

        All ranks of a machine give one folder, only for this training. `mirror`: whether a rank's part is also sent to the next
        machine; None: only if no replica on another machine has the same values.
        """
        groups = self._place.same_parameters, self._place.whole_model
        own = MeshRank(*(0 if group is None else dist.get_rank(group) for group in groups))
        return LocalCheckpoint(self._state, own, Path(folder).expanduser().resolve(), mirror)

    def _path(self, folder: str | os.PathLike[str]) -> Path:
        """The absolute path. Raises `CheckpointError` if an asynchronous save is not over."""
        check_not_saving(self._calls)
        return Path(folder).expanduser().resolve()

    def _read(self, path: Path, *, copied: bool = False) -> dict[str, Any]:
        """This rank's entries or copies of them. Removes the files of a killed save. Fails on all ranks or on none."""
        with self._calls.all_ranks(f"checkpoint {path}") as alike, without_os_errors():
            if self._state.first:
                _check_replaceable(path)
                shutil.rmtree(_partial(path), ignore_errors=True)
                path.parent.mkdir(parents=True, exist_ok=True)
            own = self._state.entries()
            entries = host_copies(own) if copied else own
            alike.update(self._state.alike())
        return entries

    def _publish(self, path: Path) -> None:
        with self._calls.all_ranks(f"checkpoint {path} is complete"), without_os_errors():
            if self._state.first:
                if path.exists():
                    shutil.rmtree(_before(path), ignore_errors=True)
                    path.rename(_before(path))
                _partial(path).rename(path)
                shutil.rmtree(_before(path), ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    if path.exists() and not (path.is_dir() and ((path / METADATA).is_file() or not any(path.iterdir()))):
        raise CheckpointError(f"{path} is no checkpoint, and a save would replace it: name a new folder, or remove this one")


def complete(path: Path) -> Path:
    """The folder of the latest complete checkpoint. Raises `CheckpointError` if there is none."""
    for found in (path, _before(path)):
        if (found / METADATA).is_file():
            return found
    if _partial(path).exists():
        raise CheckpointError(f"{path} has no complete checkpoint: {_partial(path).name} is what a save that was cut off left")
    raise CheckpointError(f"{path} has no checkpoint: it has no file .metadata, which every complete checkpoint has")


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _before(path: Path) -> Path:
    return path.with_name(f"{path.name}.before")
