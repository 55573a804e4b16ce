"""Print or empty the cache: `python -m graphpp.cache [--clear] [--keep BYTES] [--folder FOLDER]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphpp.cache.contents import folder
from graphpp.cache.listing import Listing


def main() -> None:
    """Read the arguments, and print the entries or the removed ones."""
    parser = argparse.ArgumentParser(prog="python -m graphpp.cache", description="Show or empty the cache of graphpp.")
    parser.add_argument("--clear", action="store_true", help="remove entries, the one used longest ago first")
    parser.add_argument("--keep", type=int, default=0, help="bytes that --clear leaves (default: 0)")
    parser.add_argument("--folder", type=Path, default=folder(), help="the folder of the cache (default: %(default)s)")
    given = parser.parse_args()
    print(Listing.emptied(given.folder, given.keep) if given.clear else Listing.found(given.folder))


if __name__ == "__main__":
    main()
