"""The cache folder of compiled regions and measured times, shared by ranks and later runs. Imports no other package."""

from graphpp.cache.contents import clear, entries
from graphpp.cache.disk_cache import Entry
from graphpp.cache.disk_cache import default_folder as folder

__all__ = ["Entry", "clear", "entries", "folder"]
