"""The cache folder in which compiled regions and measured times are kept for other ranks and later runs.

`graphpp.cache.folder()`, `entries()` and `clear()` show and empty the folder, as the command `graphpp cache` does.
`disk_cache.py` has the entries, their locks and their limit. Imports no other package of graphpp.
"""

from graphpp.cache.contents import clear, entries
from graphpp.cache.disk_cache import Entry
from graphpp.cache.disk_cache import default_folder as folder

__all__ = ["Entry", "clear", "entries", "folder"]
