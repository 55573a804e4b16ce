"""A checkpoint folder: written completely or not at all, read by any layout of ranks.

- `save` writes into a folder of its own (`in_progress.py`) and replaces `.metadata` once all ranks have written, so a process
  killed at any moment leaves the old or the new checkpoint, and of two jobs that save at one time one has the folder.
- The files are those of `torch.distributed.checkpoint`, readable by `dcp.load`. All ranks see one file system.
- `load` runs no code that a file names (`safe_reading.py`); a checkpoint that does not fit changes nothing (`restore.py`).
- A save removes only the data files of the checkpoint that it replaces. Of several replicas the first writes.
- Errors are `CheckpointError` on all ranks; if only one rank fails, the others raise `MismatchError`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from graphpp._torch.checkpoint_files import NamedWriter, write_entries
from graphpp.arguments import FLAG, PATH, checked, or_none
from graphpp.checkpoint.in_progress import (
    METADATA,
    PARTIAL,
    PendingSave,
    UnfinishedSave,
    host_copies,
    in_background,
    new_name,
    published,
    remove_replaced,
)
from graphpp.checkpoint.local import LocalCheckpoint
from graphpp.checkpoint.machines import MeshRank
from graphpp.checkpoint.restore import ALLOWED, ENTRY, restore_from, told, without_os_errors
from graphpp.checkpoint.safe_reading import SafeReader
from graphpp.checkpoint.training_state import RankCalls, TrainingState, check_not_saving
from graphpp.errors import CheckpointError, MismatchError
from graphpp.parallel.rank_place import RankPlace

_DATA = "*.distcp"


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
        """This rank's entries, by names that do not depend on ranks, stages or schedule.

        Optimizers without state have entries for it too: memory that `dcp.load` fills.
        """
        entries = self._state.entries()
        entries["optimizer"] |= self._state.first_optimizer_state()
        return entries

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's entries. Called by all ranks. Raises `CheckpointError` for another training or missing state."""
        with self._calls.all_ranks("the loaded entries fit"):
            self._state.check_plain(state)
        group, found = self._calls.file_group, [state.get("random")]
        if group is not None:
            found *= dist.get_world_size(group)
            dist.all_gather_object(found, state.get("random"), group)
        self._state.restore({**state, "random": next(filter(None, found), {})})

    @checked(CheckpointError, folder=PATH)
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint. Called by all ranks. If it fails or is killed, the folder has the previous checkpoint.

        Raises `CheckpointError` if the folder is a file or has a checkpoint of another program; other files in it stay.
        """
        path = self._path(folder)
        with self._calls.all_replicas(f"checkpoint {path}"):
            if self._writes:
                entries, save = self._begin(path)
                with save:
                    with self._calls.watched(), told():
                        write_entries({ENTRY: entries}, NamedWriter(save.path, save.name), self._calls.file_group)
                    self._publish(save)

    @checked(CheckpointError, folder=PATH)
    def async_save(self, folder: str | os.PathLike[str]) -> PendingSave:
        """Copy the training to host memory and write it in the background. Called by all ranks.

        Call `wait` of the result before the next save or load.
        """
        path = self._path(folder)
        written: list[tuple[UnfinishedSave, Future[Any]]] = []

        def end() -> None:
            self._calls.saving = None
            with self._calls.all_replicas(f"checkpoint {path} is complete"):
                for save, result in written:
                    with save:
                        with self._calls.watched(), told():
                            result.result()
                        self._publish(save)

        with self._calls.all_replicas(f"checkpoint {path}"):
            if self._writes:
                entries, save = self._begin(path, copied=True)
                writer, group = NamedWriter(save.path, save.name), self._calls.file_group
                written.append((save, in_background(lambda: write_entries({ENTRY: entries}, writer, group))))
        self._calls.saving = str(path)
        return PendingSave(written[0][1] if written else None, end)

    @checked(CheckpointError, folder=PATH, missing_ok=FLAG, allow=ALLOWED)
    def load(self, folder: str | os.PathLike[str], *, missing_ok: bool = False, allow: str | Collection[str] = ()) -> bool:
        """Read a checkpoint written by any layout of ranks, stages and schedule. Called by all ranks.

        Returns True; with `missing_ok` False if no save into `folder` has completed yet. Raises `CheckpointError` on all ranks
        if the folder is damaged or is of another training. `allow`: differences that are accepted, one word or several:
        "entries" of the checkpoint that this training lacks are left out; "dtypes": values of other dtypes are converted;
        "classes": an optimizer or object for which another class saved stays as it is; "settings": a scheduler takes those of
        the checkpoint.
        """
        path = self._path(folder)

        def find() -> Path | None:
            torn = published(path, _DATA)  # before the look for metadata, with which another job's save may end
            return complete(path) if torn or not missing_ok or _has_checkpoint(path) else None

        return restore_from(self._state, f"the checkpoint in {path}", find, allow=allow)

    @checked(CheckpointError, folder=PATH, mirror=or_none(FLAG))
    def local(self, folder: str | os.PathLike[str], *, mirror: bool | None = None) -> LocalCheckpoint:
        """Save and load this training in a folder of each machine, in memory (`/dev/shm/run`) or on a local disk.

        All ranks of a machine give one folder, only for this training. `mirror`: whether a rank's part is also sent to the next
        machine; None: only if no replica on another machine has the same values.
        """
        copies, model = self._place.same_parameters, self._place.whole_model
        own = MeshRank(0 if copies is None else dist.get_rank(copies), 0 if len(model) == 1 else model.index(dist.get_rank()))
        return LocalCheckpoint(self._state, own, Path(folder).expanduser().resolve(), mirror)

    def _path(self, folder: str | os.PathLike[str]) -> Path:
        """The absolute path. Raises `CheckpointError` if an asynchronous save is not over."""
        check_not_saving(self._calls)
        return Path(folder).expanduser().resolve()

    def _begin(self, path: Path, *, copied: bool = False) -> tuple[dict[str, Any], UnfinishedSave]:
        """This rank's entries or copies of them, and the folder for its files. Fails on all ranks or on none."""
        with self._calls.all_ranks(f"checkpoint {path}") as alike, without_os_errors():
            if self._state.first:
                _data_files(path)
            own = self._state.entries()
            entries = host_copies(own) if copied else own
            alike.update(self._state.alike())
        return entries, begun(path, self._calls, first=self._state.first)

    def _publish(self, save: UnfinishedSave) -> None:
        path = save.folder
        with self._calls.all_ranks(f"checkpoint {path} is complete"), without_os_errors():
            if self._state.first:
                replaced = _data_files(path)
                save.publish(METADATA)
                for file in replaced:
                    (path / file).unlink(missing_ok=True)
                remove_replaced(path, _DATA, lambda: [SafeReader(path).save])


def begun(folder: Path, calls: RankCalls, *, first: bool) -> UnfinishedSave:
    """A save whose partial folder the first rank has made. Called by all ranks that write; raises on all or on none.

    No other rank goes on before the folder is there: torch's writer would make it, and several pipelines may write one save.
    """
    save, fault, group = UnfinishedSave(folder, new_name()), "", calls.file_group
    with calls.watched(), save:
        try:
            with without_os_errors():
                if first:
                    save.begin()
        except CheckpointError as error:
            fault = str(error)
        made: list[tuple[str, str] | None] = [(save.name, fault) if first else None]
        if group is not None:
            made *= dist.get_world_size(group)
            dist.all_gather_object(made, (save.name, fault) if first else None, group)
        name, fault = next(filter(None, made))
        if fault and first:
            raise CheckpointError(fault)
        if fault:
            raise MismatchError(f"other ranks failed, so nothing was run here:\n  the first rank: CheckpointError: {fault}")
    return save if first else UnfinishedSave(folder, name)


def _has_checkpoint(path: Path) -> bool:
    return os.path.lexists(path / METADATA) or (path.exists() and not path.is_dir())


def _data_files(path: Path) -> set[str]:
    """The data files of the checkpoint in a folder. Raises `CheckpointError` if a save may not replace what is there."""
    if not _has_checkpoint(path):
        return set()
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint, and a save would replace it: name a folder, or remove this file")
    try:
        metadata = SafeReader(path).read_metadata()
    except CheckpointError as fault:
        raise CheckpointError(f"{fault}. A save would replace it: name a new folder, or remove this file") from fault
    if not any(name.startswith(f"{ENTRY}.") for name in metadata.state_dict_metadata):
        raise CheckpointError(
            f"{path} has a checkpoint that pipe.checkpoint did not write, and a save would replace it: name a new folder, or "
            "remove this one"
        )
    names = {place.relative_path for place in (metadata.storage_data or {}).values()}
    return {name for name in names if name.endswith(_DATA[1:])}


def complete(path: Path) -> Path:
    """The folder, if it has a complete checkpoint. Raises `CheckpointError` if not."""
    if (path / METADATA).is_file():
        return path
    for partial in path.glob(f"{PARTIAL}*"):
        raise CheckpointError(f"{path} has no complete checkpoint: {partial.name} is of a save that was cut off or goes on")
    raise CheckpointError(f"{path} has no checkpoint: it has no file {METADATA}, which every complete checkpoint has")
