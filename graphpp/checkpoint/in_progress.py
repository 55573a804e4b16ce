"""A save in progress: the folder that it makes for its files, and the thread that writes them while the training continues.

- A save writes into `<folder>/.partial-<name>`, which it makes, under a random name. The names of its data files have that name
  too. `publish` moves complete files into `<folder>`, last the head (the file that readers open first), which replaces the head
  of an earlier save at once. All other files in `<folder>` stay.
- The first rank holds a lock in the partial folder. The next save removes the files of a killed one: those of a partial folder
  whose lock no process holds. A file system without locks keeps them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from graphpp._torch.parallel.sharded_tensor import local_of, with_local
from graphpp._torch.pytree import tree_flatten, tree_unflatten
from graphpp.streams import to_host, wait_for_stream

PARTIAL = ".partial-"
_NAME = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_LOCK = ".lock"
METADATA = ".metadata"  # of torch's distributed checkpoint; exists only in complete checkpoints
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"  # of one file, of several
_HEADS = (METADATA, WEIGHTS, WEIGHTS_INDEX)


def host_copies(entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` with every tensor copied to host memory once, all at the same time; complete on return."""
    leaves, structure = tree_flatten(entries)
    tensors = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copies = {
        key: with_local(tensor, to_host(_own(tensor), tensor.device)) for key, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values()}:
        wait_for_stream(device)
    staged: dict[str, Any] = tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], structure)
    return staged


def _own(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    return tensor if local is None else local


def in_background(work: Callable[[], object]) -> Future[Any]:
    thread = ThreadPoolExecutor(1, "graphpp-checkpoint")
    written = thread.submit(work)
    thread.shutdown(wait=False)
    return written


class PendingSave:
    """A save that continues in the background; the training may continue meanwhile."""

    def __init__(self, written: Future[Any] | None, publish: Callable[[], None]) -> None:
        """`written`: None on a rank whose replica does not write; `publish` raises the error of the writing."""
        self._written, self._publish = written, publish
        self._waited = False

    def done(self) -> bool:
        """Whether everything is written, so that `wait` would not wait for the disk."""
        return self._written is None or self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete, and publish it. Called by all ranks; raises the error of the writing."""
        if not self._waited:
            self._waited = True
            self._publish()


def new_name() -> str:
    """A random name for a save."""
    return secrets.token_hex(8)


def save_in(file: str) -> str:
    """The name of the save in the name of a file; empty without one."""
    found = _NAME.search(file)
    return "" if found is None else found[0]


class UnfinishedSave:
    """The partial folder of a save. As a context: an error in the body removes it on the rank that made it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.path = folder, name, folder / f"{PARTIAL}{name}"
        self._lock: int | None = None  # a file descriptor, so that a lock is held until the process ends

    def __enter__(self) -> UnfinishedSave:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._lock is not None:
            with suppress(OSError):
                if any((self.path / head).exists() for head in _HEADS):  # not published
                    for file in self.folder.glob(f"*[-_]{self.name}[-_]*"):
                        file.unlink()
            self._remove()

    def begin(self) -> None:
        """Make the folder, on one rank; before that, remove the files of killed saves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.folder.glob(f"{PARTIAL}*"):
            killed = UnfinishedSave(self.folder, save_in(other.name))
            if killed.path == other and not other.is_symlink() and _is_dead(other):
                killed._remove()
        self.path.mkdir(parents=True)
        new = self.path / f"{_LOCK}.new"  # a lock has its name once it is held
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path / _LOCK)

    def publish(self, head: str) -> None:
        """Move the complete files into the folder, `head` last. Called on the rank that made the partial folder."""
        for file in sorted(self._own(head), key=lambda file: file.name == head):
            file.replace(self.folder / file.name)
        self._remove()

    def _own(self, *others: str) -> list[Path]:
        """This save's files in the partial folder: those with its name, and `others`."""
        return [file for file in self.path.iterdir() if self.name in file.name or file.name in others]

    def _remove(self) -> None:
        """Remove this save's files from the partial folder, and the folder if no others are in it."""
        with suppress(OSError):  # other jobs may remove the same killed save, or it is another user's
            for file in self._own(*_HEADS, f"{METADATA}.tmp", _LOCK, f"{_LOCK}.new"):
                file.unlink(missing_ok=True)
            self.path.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_dead(partial: Path) -> bool:
    """Whether no process holds the lock of a partial folder; False if that cannot be known."""
    try:
        with (partial / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def published(folder: Path, pattern: str) -> dict[Path, str]:
    """The files of this pattern that belong to no unfinished save, and the names of their saves (empty without a name)."""
    found = {file: save_in(file.name) for file in folder.glob(pattern)}
    return {file: name for file, name in found.items() if not name or not (folder / f"{PARTIAL}{name}").exists()}


def remove_replaced(folder: Path, pattern: str, current: Callable[[], Collection[str]]) -> None:
    """Remove the files of saves that later ones have replaced. `current`: the names of the saves that heads name now."""
    files = published(folder, pattern)
    kept = {"", *current()}  # asked after the look for partial folders: a save that ends meanwhile is not removed
    for file, name in files.items():
        if name not in kept:
            file.unlink(missing_ok=True)
