"""Print or empty the cache: `python -m graphpp.cache [--clear] [--keep BYTES] [--folder FOLDER]`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from graphpp.cache.contents import clear, entries, folder
from graphpp.cache.disk_cache import Entry
from graphpp.units import spell_bytes


def main() -> None:
    """Read the arguments, and print the entries or the removed ones."""
    parser = argparse.ArgumentParser(prog="python -m graphpp.cache", description="Show or empty the cache of graphpp.")
    parser.add_argument("--clear", action="store_true", help="remove entries, the one used longest ago first")
    parser.add_argument("--keep", type=int, default=0, help="bytes that --clear leaves (default: 0)")
    parser.add_argument("--folder", type=Path, default=folder(), help="the folder of the cache (default: %(default)s)")
    given = parser.parse_args()
    found = clear(given.folder, keep=given.keep) if given.clear else entries(given.folder)
    for entry in found:
        print(f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.used))}  {spell_bytes(entry.size):>10}  {entry.key}")
    print(f"{given.folder}: {_total(found)}{' removed' if given.clear else ''}")


def _total(found: list[Entry]) -> str:
    count = f"{len(found)} {'entry' if len(found) == 1 else 'entries'}"
    return f"{count}, {spell_bytes(sum(entry.size for entry in found))}"


if __name__ == "__main__":
    main()
