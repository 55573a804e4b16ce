"""The cache folder in which captured graphs and compiled regions are kept for other ranks and later runs.

`graphpp.cache.folder()`, `entries()` and `clear()` show and empty the folder, and so does `graphpp cache` in a shell.
`disk_cache.py` has the entries, their locks and their limit. Imports no other package of graphpp.
"""

from graphpp.cache.contents import clear, entries, folder
from graphpp.cache.disk_cache import Entry

__all__ = ["Entry", "clear", "entries", "folder"]
