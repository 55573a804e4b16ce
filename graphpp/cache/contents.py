"""The public functions of `graphpp.cache`, and the text of `graphpp cache`; `root=None`: the default folder."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from graphpp.arguments import PATH, Accepted, checked, or_none
from graphpp.cache.disk_cache import DiskCache, Entry, default_folder, is_cache
from graphpp.errors import GraphPPError
from graphpp.units import spell_bytes

_BYTES = Accepted("a number of bytes, 0 or more", lambda value: type(value) is int and value >= 0)


@checked(GraphPPError, root=or_none(PATH))
def entries(root: str | os.PathLike[str] | None = None) -> list[Entry]:
    """The entries with their bytes and the time of their last use, least recently used first."""
    path = default_folder() if root is None else Path(root)
    return DiskCache(path).entries() if path.exists() else []


@checked(GraphPPError, root=or_none(PATH), keep=_BYTES)
def clear(root: str | os.PathLike[str] | None = None, *, keep: int = 0) -> list[Entry]:
    """Evict least recently used entries until at most `keep` bytes are left; returns the evicted. Open entries stay.

    With `keep=0`, the measured kernel choices and layer times are removed too. Raises `GraphPPError` if `keep` is no number of
    bytes, `root` is no path, or the folder has subfolders but is no cache.
    """
    path = default_folder() if root is None else Path(root)
    if not is_cache(path):
        raise GraphPPError(f"{path} is no cache of graphpp, so nothing in it is removed: name another folder")
    if not path.exists():
        return []
    cache = DiskCache(path)
    if keep == 0:
        cache.remove_tables()
    return cache.shrink(keep)


@dataclass(frozen=True)
class Listing:
    """Entries of one folder, least recently used first. `removed`: the entries were removed."""

    folder: Path
    entries: tuple[Entry, ...]
    removed: bool = False

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def total(self) -> str:
        """One line: the folder, the number of entries and their bytes."""
        count = f"{len(self.entries)} {'entry' if len(self.entries) == 1 else 'entries'}"
        return f"{self.folder}: {count}, {spell_bytes(self.bytes)}{' removed' if self.removed else ''}"

    def __str__(self) -> str:
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.used))}  {spell_bytes(entry.size):>10}  {entry.key}"
            for entry in self.entries
        ]
        return "\n".join([*lines, self.total])

    def document(self) -> dict[str, object]:
        """The listing as data; times in seconds since 1970."""
        found = [asdict(entry) for entry in self.entries]
        return {"folder": str(self.folder), "bytes": self.bytes, "removed": self.removed, "entries": found}
