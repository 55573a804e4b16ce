"""A cache folder of compiled code, shared by processes and runs.

Contract
--------
- An entry is a folder named by its key. A process opens it under an exclusive lock, which the death of the process releases.
- Closing an entry writes its manifest last, with size and SHA-256 of every file. An entry that differs from its manifest is
  deleted when it is opened, so that no part of it is loaded.
- When an entry's files changed and all entries exceed the limit, least recently used entries are evicted, except entries that
  another process has open.
- If the root cannot be written, or another user owns it or may write to it, a temporary folder replaces it until the process
  ends, with a warning. An entry to which others may write is deleted when it is opened.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpp.errors import GraphPPError
from graphpp.log import logger

if TYPE_CHECKING:
    from filelock import FileLock

_LOG = logger(__name__)
_MANIFEST = "manifest.json"
_LOCKS = "locks"  # the folder of the lock files, next to the entries
_LIMIT = 10 * 2**30  # bytes
_OTHERS = 0o022  # the rights of the group and of all others to write


def default_folder() -> Path:
    """The folder that the variable GRAPHPP_CACHE names, else `graphpp` in the user's cache folder."""
    folder = os.environ.get("GRAPHPP_CACHE")
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpp"
    except RuntimeError:  # a user without a home folder, as in some containers
        return Path(tempfile.gettempdir()) / f"graphpp-{os.getuid()}"


def default_limit() -> int:
    """The maximum bytes of all entries: GRAPHPP_CACHE_LIMIT, else 10 GiB."""
    limit = os.environ.get("GRAPHPP_CACHE_LIMIT") or _LIMIT
    try:
        found = int(limit)
    except ValueError:
        found = -1
    if found < 0:
        raise GraphPPError(f"GRAPHPP_CACHE_LIMIT is a number of bytes, 0 or more, got {limit!r}")
    return found


@dataclass(frozen=True)
class Entry:
    """One entry of a cache. `used`: when it was last opened, in seconds since 1970."""

    key: str
    size: int  # bytes
    used: float


class DiskCache:
    def __init__(self, root: Path) -> None:
        self._limit = default_limit()
        self.root = _writable(root)

    @contextlib.contextmanager
    def entry(self, key: str) -> Iterator[Path]:
        """Open the folder of a key under its exclusive lock; the folder is empty if the entry is new or was incomplete."""
        with self.lock(key):
            folder = self.root / key
            before = _contents(folder)
            if _table(folder / _MANIFEST) != before or any(map(not_ours, _paths(folder))):  # incomplete, damaged or not ours
                shutil.rmtree(folder)
                before = {}
            folder.mkdir(exist_ok=True)
            yield folder
            for path in filter(not_ours, _paths(folder)):  # the process's umask lets others write
                keep_ours(path)
            after = _contents(folder)
            _write(folder / _MANIFEST, json.dumps(after))
        if after != before:
            self.shrink(self._limit)

    def entries(self) -> list[Entry]:
        """The complete and incomplete entries, least recently used first."""
        found = []
        for folder in self.root.iterdir() if self.root.exists() else ():
            if folder.is_dir() and folder.name != _LOCKS:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile by another process
                    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                    manifest = folder / _MANIFEST
                    used = (manifest if manifest.exists() else folder).stat().st_mtime
                    found.append(Entry(folder.name, size, used))
        return sorted(found, key=lambda entry: entry.used)

    def shrink(self, limit: int) -> list[Entry]:
        """Evict least recently used entries until at most `limit` bytes are left; returns the evicted entries."""
        entries = self.entries()
        size = sum(entry.size for entry in entries)
        removed = []
        for entry in entries:
            if size > limit and self._remove(entry.key):
                size -= entry.size
                removed.append(entry)
        return removed

    def _remove(self, key: str) -> bool:
        """Remove an entry; False if a process has it open."""
        from filelock import Timeout

        try:
            with self.lock(key).acquire(timeout=0):
                shutil.rmtree(self.root / key, ignore_errors=True)
        except Timeout:
            return False
        return True

    def remove_tables(self) -> None:
        """Remove all tables, but no other file under the root (only tables have `*.json.lock`)."""
        for lock in (self.root / _LOCKS).glob("*.json.lock"):
            name = lock.name.removesuffix(".lock")
            with self.lock(name):
                (self.root / name).unlink(missing_ok=True)

    def lock(self, key: str) -> FileLock:
        from filelock import FileLock  # loaded by the first compilation

        (self.root / _LOCKS).mkdir(parents=True, exist_ok=True)  # the root may have been deleted
        return FileLock(self.root / _LOCKS / f"{key}.lock")

    def read(self, name: str) -> dict[str, str]:
        """The table in the file `name` under the root; empty if the file is missing or unreadable."""
        return {str(key): str(value) for key, value in _table(self.root / name).items()}

    def write(self, name: str, table: dict[str, str]) -> None:
        """Merge `table` into the file `name`; a failed write is only logged."""
        try:
            with self.lock(name):
                _write(self.root / name, json.dumps(self.read(name) | table, indent=0, sort_keys=True))
        except OSError as error:
            _LOG.warning("the cache %s cannot be written (%s); %s is not kept", self.root, error, name)


def not_ours(path: Path) -> str | None:
    """Why code in a file or folder is not to be run: another user may have written it; None for files of this user and of root.

    A missing file, and a system without users, has no other user's code.
    """
    if not path.exists() or not hasattr(os, "getuid"):
        return None
    found = path.stat()
    if found.st_uid not in (0, os.getuid()):
        return f"{path} belongs to the user {found.st_uid}"
    return f"other users may write to {path}" if found.st_mode & _OTHERS else None


def keep_ours(path: Path) -> None:
    """Let no other user write to a file or folder."""
    path.chmod(path.stat().st_mode & ~_OTHERS)


def _paths(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def is_cache(root: Path) -> bool:
    """Whether a folder is a cache or can become one: it has the folder of locks, has no subfolder, or does not exist."""
    return (root / _LOCKS).is_dir() or not (root.exists() and any(path.is_dir() for path in root.iterdir()))


def _contents(folder: Path) -> dict[str, list[int | str]]:
    """Size in bytes and SHA-256 of each file by relative path, without lock files and the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {
        str(path.relative_to(folder)): [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in files
        if path.name != _MANIFEST
    }


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str) -> None:
    """Write a file atomically, by a rename."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _writable(root: Path) -> Path:
    """`root`, or a temporary folder (with a warning) if `root` cannot be written or others may have written to it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            why = not_ours(root)
    except OSError as error:
        why = f"it cannot be written: {error}"
    if why is None:
        return root
    replaced = Path(tempfile.mkdtemp(prefix="graphpp-"))
    atexit.register(shutil.rmtree, replaced, ignore_errors=True)
    advice = "set GRAPHPP_CACHE to a folder that you own and that no other user may write to (chmod go-w)"
    _LOG.warning("the cache %s is not used (%s): what is compiled now is kept in %s only; %s", root, why, replaced, advice)
    return replaced
