"""The entries of a cache folder as text and as data: one implementation for `python -m graphpp.cache` and `graphpp cache`.

Contract: a `Listing` is what was found or removed at one moment; making one of `removed` entries has emptied the folder.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from graphpp.cache.contents import clear, entries, folder
from graphpp.cache.disk_cache import Entry
from graphpp.units import spell_bytes


@dataclass(frozen=True)
class Listing:
    """Entries of one folder, the one used longest ago first. `removed`: the entries are no longer there."""

    folder: Path
    entries: tuple[Entry, ...]
    removed: bool = False

    @classmethod
    def found(cls, root: Path | None = None) -> Listing:
        """The entries of the folder; None: of this user's folder."""
        return cls(root or folder(), tuple(entries(root)))

    @classmethod
    def emptied(cls, root: Path | None = None, keep: int = 0) -> Listing:
        """Remove the entries used longest ago until at most `keep` bytes are left. Raises `GraphPPError`."""
        return cls(root or folder(), tuple(clear(root, keep=keep)), removed=True)

    @property
    def bytes(self) -> int:
        """The bytes of all entries."""
        return sum(entry.size for entry in self.entries)

    @property
    def total(self) -> str:
        """The folder, the number of entries and their bytes, on one line."""
        count = f"{len(self.entries)} {'entry' if len(self.entries) == 1 else 'entries'}"
        return f"{self.folder}: {count}, {spell_bytes(self.bytes)}{' removed' if self.removed else ''}"

    def __str__(self) -> str:
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.used))}  {spell_bytes(entry.size):>10}  {entry.key}"
            for entry in self.entries
        ]
        return "\n".join([*lines, self.total])

    def document(self) -> dict[str, object]:
        """The same as data; times in seconds since 1970."""
        found = [asdict(entry) for entry in self.entries]
        return {"folder": str(self.folder), "bytes": self.bytes, "removed": self.removed, "entries": found}
