"""The saves in a machine's folder, and the newest save that all machines together have.

- A save is a folder `<steps>-<number>-<training>-<run>` with a subfolder for each replica's part. `training` is a random name
  that runs inherit from the save that they load; `run` is a random name of the run that wrote the save. Other files in a
  machine's folder are never read or removed.
- A file counts if it has all bytes that the metadata assigns to it. Unreadable metadata counts as missing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from graphpp.checkpoint.in_progress import METADATA
from graphpp.checkpoint.machines import INCOMING, MeshRank, Stored
from graphpp.checkpoint.safe_reading import SafeReader, save_of_files
from graphpp.errors import CheckpointError
from graphpp.log import logger

_LOG = logger(__name__)
PARTIAL = ".partial"
_NAME = re.compile(r"(\d{12})-(\d{6})-([0-9a-f]{32})-([0-9a-f]{32})(\.partial)?")


def name_of_save(steps: int, number: int, training: str, run: str) -> str:
    """The name of a save; newer saves of a training sort later. `training`, `run`: 32 hexadecimal digits."""
    return f"{steps:012}-{number:06}-{training}-{run}"


def number_of(save: str) -> int:
    return int(save.split("-")[1])


def training_of(save: str) -> str:
    return save.split("-")[2]


def save_of(part: str) -> str:
    """The save of a part `<save>/<replica>`."""
    return part.partition("/")[0]


def saves_in(folder: Path) -> list[str]:
    """The names of all saves in a machine's folder, including unpublished ones."""
    if not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if _NAME.fullmatch(each.name) and not each.is_symlink())


def keep_only(saves: Collection[str], folder: Path, known: Collection[str]) -> None:
    """Remove all other known saves of a machine."""
    for name in saves_in(folder):
        if name in known and name not in saves:
            shutil.rmtree(folder / name)


def files_in(within: Path, folder: Path) -> dict[str, int]:
    """Bytes of all complete files in `within`, by path relative to `folder`."""
    files = (file for file in within.rglob("*") if file.is_file() and file.suffix != INCOMING)
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


@dataclass(frozen=True)
class Part:
    """The files of a replica in a save: their minimum sizes, and a digest of where each entry is."""

    sizes: Mapping[str, int]
    layout: str

    @classmethod
    def of(cls, metadata: Metadata) -> Part:
        places = [(str(index), place) for index, place in (metadata.storage_data or {}).items()]
        sizes, end = {METADATA: 1}, len(save_of_files(metadata))
        for _, place in places:
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length + end)
        lines = sorted(f"{index} {place.relative_path} {place.offset} {place.length}" for index, place in places)
        return cls(sizes, hashlib.sha256("\n".join(lines).encode()).hexdigest())

    def is_whole(self, file: str, size: int) -> bool:
        return size >= self.sizes.get(Path(file).name, 0)


def parts_in(folder: Path) -> dict[str, Part]:
    """Parts of published saves whose metadata is on this machine, by `<save>/<replica>`."""
    found: dict[str, Part] = {}
    for save in saves_in(folder):
        for metadata in folder.glob(f"{save}/*/{METADATA}") if not save.endswith(PARTIAL) else ():
            try:
                found[f"{save}/{metadata.parent.name}"] = Part.of(SafeReader(metadata.parent).read_metadata())
            except CheckpointError as fault:
                _LOG.warning("a save is left out: %s", fault)
    return found


class Saves:
    """The published saves of all machines. `parts`, `files`: by rank, those on its machine."""

    def __init__(self, parts: Mapping[MeshRank, Mapping[str, Part]], files: Stored) -> None:
        self._parts = {name: part for own in parts.values() for name, part in own.items()}
        self.files: dict[MeshRank, dict[str, int]] = {}
        for rank, own in files.items():
            self.files[rank] = {file: size for file, size in own.items() if self._is_whole(file, size, parts[rank])}
        self._there = set[str]().union(*self.files.values())

    def newest(self, replica: int) -> tuple[str, list[str]] | None:
        """The part of the newest complete save for a replica to read, and the parts whose files complete it; None: no save.

        A replica reads its own part, else another replica's, else several parts that are complete together (replicas have equal
        parameters and file layouts). Raises `CheckpointError` for saves of several trainings.
        """
        whole = {name: [name] for name in self._parts if self._complete([name])}
        alike: dict[tuple[str, str], list[str]] = {}
        for name in sorted(self._parts):
            alike.setdefault((save_of(name), self._parts[name].layout), []).append(name)
        together = {names[0]: names for names in alike.values() if names[0] not in whole and self._complete(names)}
        trainings = {training_of(name) for name in (*whole, *together)}
        if not trainings:
            return None
        if len(trainings) > 1:
            raise CheckpointError(
                f"the machines' folders have saves of {len(trainings)} trainings: give each training a folder of its own, or "
                f"remove {save_of(min((*whole, *together)))}"
            )
        save = max(save_of(name) for name in (*whole, *together))
        own = f"{save}/{replica}"
        candidates = [own] if own in whole else sorted(name for name in whole if save_of(name) == save)
        if candidates:
            return candidates[0], [candidates[0]]
        first = min(name for name in together if save_of(name) == save)
        return first, together[first]

    def _is_whole(self, file: str, size: int, readable: Mapping[str, Part]) -> bool:
        part, _, name = file.rpartition("/")
        known = readable if name == METADATA else self._parts
        return part in known and known[part].is_whole(file, size)

    def _complete(self, names: list[str]) -> bool:
        """Whether each file of equal parts exists in one of them."""
        return all(any(f"{name}/{file}" in self._there for name in names) for file in self._parts[names[0]].sizes)


def link(parts: list[str], files: Collection[str], folder: Path) -> None:
    """Hard-link a machine's files of equal parts into the first part's folder. `files`: the complete files."""
    first, *others = parts
    for part in others:
        for file in sorted(files):
            source, target = folder / file, folder / first / Path(file).name
            if file.startswith(f"{part}/") and f"{first}/{source.name}" not in files:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                os.link(source, target)
