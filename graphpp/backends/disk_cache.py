"""A folder of what was compiled, shared by processes and runs: an entry is whole, or it is made again.

Contract
--------
- An entry is a folder under a key. Whoever opens it holds it alone (a lock that dies with its process); where another
  process makes it, the rest wait, and find it made.
- On closing, a manifest with the size and SHA-256 of every file is written last. An entry whose files are not those of its
  manifest is removed before it is opened: nothing of it is loaded.
- A root that cannot be written is replaced by a temporary one, which goes with the process, with a warning; one that
  somebody removed is made again.
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
from pathlib import Path

from filelock import FileLock

_LOG = logging.getLogger("graphpp")
_MANIFEST = "manifest.json"


def default_folder() -> Path:
    """The folder that the variable GRAPHPP_CACHE names, else `graphpp` in the user's folder for caches."""
    given = os.environ.get("GRAPHPP_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpp"


class DiskCache:
    """Entries under one root."""

    def __init__(self, root: Path) -> None:
        self.root = _writable(root)

    @contextlib.contextmanager
    def entry(self, key: str) -> Iterator[Path]:
        """The folder of a key, held alone; empty if it is new, or was not whole."""
        with self.lock(key):
            folder = self.root / key
            if folder.exists() and not is_complete(folder):
                shutil.rmtree(folder)
            folder.mkdir(exist_ok=True)
            yield folder
            _write(folder / _MANIFEST, json.dumps(_contents(folder)))

    def lock(self, key: str) -> FileLock:
        """A lock between processes for one key."""
        (self.root / "locks").mkdir(parents=True, exist_ok=True)  # also where somebody has removed the root meanwhile
        return FileLock(self.root / "locks" / f"{key}.lock")

    def read(self, name: str) -> dict[str, str]:
        """A table kept under the root; empty where it is missing or unreadable."""
        try:
            found = json.loads((self.root / name).read_text())
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}

    def write(self, name: str, table: dict[str, str]) -> None:
        """Keep a table, added to what others have kept meanwhile; where that fails, a step goes on all the same."""
        try:
            with self.lock(name):
                _write(self.root / name, json.dumps(self.read(name) | table, indent=0, sort_keys=True))
        except OSError as error:
            _LOG.warning("the cache %s cannot be written (%s); %s is not kept", self.root, error, name)


def is_complete(folder: Path) -> bool:
    """Whether an entry's files are those of its manifest."""
    try:
        return bool(json.loads((folder / _MANIFEST).read_text()) == _contents(folder))
    except (OSError, ValueError):
        return False


def _contents(folder: Path) -> dict[str, list[int | str]]:
    """Size and hash of each file, by its path within the folder; lock files are nobody's content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {
        str(path.relative_to(folder)): [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in files
        if path.name != _MANIFEST
    }


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _writable(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        replaced = Path(tempfile.mkdtemp(prefix="graphpp-"))
        atexit.register(shutil.rmtree, replaced, ignore_errors=True)
        _LOG.warning("the cache %s cannot be written (%s); what is compiled now is kept in %s only", root, error, replaced)
        return replaced
