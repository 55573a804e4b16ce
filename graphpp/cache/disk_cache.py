"""A cache folder of compiled code, shared by processes and runs: an entry is complete, or it is made anew.

Contract
--------
- An entry is a folder under a key. A process opens it under an exclusive lock, which is released if the process dies. Other
  processes that need the entry wait, and then find it complete.
- When an entry is closed, its manifest with the size and SHA-256 of every file is written last. An entry whose files differ
  from its manifest is deleted before it is opened, so that no part of it is loaded.
- When the files of an entry have changed and all entries together exceed the limit, the entries used longest ago are
  removed. An entry that another process has open stays.
- If the root cannot be written, a warning says so, and a temporary folder replaces it until the process ends. If somebody
  deletes the root meanwhile, it is created again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    from filelock import FileLock

_LOG = logging.getLogger("graphpp")
_MANIFEST = "manifest.json"
_LOCKS = "locks"  # the folder of the lock files, beside the entries
_LIMIT = 10 * 2**30  # bytes


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
    """The most bytes of all entries together: GRAPHPP_CACHE_LIMIT, else 10 GiB. Raises `GraphPPError` for no number."""
    limit = os.environ.get("GRAPHPP_CACHE_LIMIT") or _LIMIT
    try:
        return int(limit)
    except ValueError:
        raise GraphPPError(f"GRAPHPP_CACHE_LIMIT is a number of bytes, got {limit!r}") from None


@dataclass(frozen=True)
class Entry:
    """One entry of a cache. `used`: when the entry was last opened, in seconds since 1970."""

    key: str
    size: int  # bytes
    used: float


class DiskCache:
    """The entries and tables under one root folder."""

    def __init__(self, root: Path) -> None:
        self._limit = default_limit()
        self.root = _writable(root)

    @contextlib.contextmanager
    def entry(self, key: str) -> Iterator[Path]:
        """The folder of a key, under its exclusive lock; empty if the entry is new or was incomplete."""
        with self.lock(key):
            folder = self.root / key
            before = _contents(folder)
            if _table(folder / _MANIFEST) != before:  # torn or damaged
                shutil.rmtree(folder)
                before = {}
            folder.mkdir(exist_ok=True)
            yield folder
            after = _contents(folder)
            _write(folder / _MANIFEST, json.dumps(after))
        if after != before:
            self.shrink(self._limit)

    def entries(self) -> list[Entry]:
        """The complete and incomplete entries, the one used longest ago first."""
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
        """Remove the entries used longest ago until all have at most `limit` bytes together; returns the removed ones."""
        entries = self.entries()
        size = sum(entry.size for entry in entries)
        removed = []
        for entry in entries:
            if size <= limit:
                break
            if self._remove(entry.key):
                size -= entry.size
                removed.append(entry)
        return removed

    def _remove(self, key: str) -> bool:
        """Whether the entry could be removed; an entry that a process has open cannot."""
        from filelock import Timeout

        try:
            with self.lock(key).acquire(timeout=0):
                shutil.rmtree(self.root / key, ignore_errors=True)
        except Timeout:
            return False
        return True

    def remove_tables(self) -> None:
        """Remove all tables. Other files under the root, which have no lock here, stay."""
        for lock in (self.root / _LOCKS).glob("*.json.lock"):
            name = lock.name.removesuffix(".lock")
            with self.lock(name):
                (self.root / name).unlink(missing_ok=True)

    def lock(self, key: str) -> FileLock:
        """The lock of one key, exclusive among processes."""
        from filelock import FileLock  # loaded by the first compilation

        (self.root / _LOCKS).mkdir(parents=True, exist_ok=True)  # somebody may have deleted the root
        return FileLock(self.root / _LOCKS / f"{key}.lock")

    def read(self, name: str) -> dict[str, str]:
        """The table in the file `name` under the root; empty if the file is missing or unreadable."""
        return {str(key): str(value) for key, value in _table(self.root / name).items()}

    def write(self, name: str, table: dict[str, str]) -> None:
        """Merge `table` into the file `name`; a failure to write is logged and does not stop the step."""
        try:
            with self.lock(name):
                _write(self.root / name, json.dumps(self.read(name) | table, indent=0, sort_keys=True))
        except OSError as error:
            _LOG.warning("the cache %s cannot be written (%s); %s is not kept", self.root, error, name)


def is_cache(root: Path) -> bool:
    """Whether a folder is a cache or may become one: its folders have locks, or there are none, or it does not exist."""
    return (root / _LOCKS).is_dir() or not (root.exists() and any(path.is_dir() for path in root.iterdir()))


def _contents(folder: Path) -> dict[str, list[int | str]]:
    """Size in bytes and SHA-256 of each file by its path within the folder, without lock files and the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {
        str(path.relative_to(folder)): [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in files
        if path.name != _MANIFEST
    }


def _table(path: Path) -> dict[str, Any]:
    """The table in a JSON file; empty if the file is missing or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a temporary file, then a rename."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _writable(root: Path) -> Path:
    """The root, or a temporary folder (with a warning) if the root cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        replaced = Path(tempfile.mkdtemp(prefix="graphpp-"))
        atexit.register(shutil.rmtree, replaced, ignore_errors=True)
        _LOG.warning("the cache %s cannot be written (%s); what is compiled now is kept in %s only", root, error, replaced)
        return replaced
