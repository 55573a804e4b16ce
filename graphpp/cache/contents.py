"""Show and empty the cache folder of this user: the public functions of `graphpp.cache`.

Contract: the functions take the folder that the variable GRAPHPP_CACHE names, else the user's own; another folder, such as
that of `graphpp.Inductor(cache=)`, is given by `root`. An entry that a process has open stays.
"""

from __future__ import annotations

import os
from pathlib import Path

from graphpp.arguments import PATH, Accepted, checked, or_none
from graphpp.cache.disk_cache import DiskCache, Entry, default_folder, is_cache
from graphpp.errors import GraphPPError

_BYTES = Accepted("a number of bytes, 0 or more", lambda value: type(value) is int and value >= 0)


def folder() -> Path:
    """The folder of the cache."""
    return default_folder()


@checked(GraphPPError, root=or_none(PATH))
def entries(root: str | os.PathLike[str] | None = None) -> list[Entry]:
    """The entries with their bytes and the time of their last use, the one used longest ago first."""
    path = _path(root)
    return DiskCache(path).entries() if path.exists() else []


@checked(GraphPPError, root=or_none(PATH), keep=_BYTES)
def clear(root: str | os.PathLike[str] | None = None, *, keep: int = 0) -> list[Entry]:
    """Remove the entries used longest ago until at most `keep` bytes are left; returns the removed entries.

    Without `keep`, the choices of kernels and the seconds of layers that were measured on this device go as well.
    Raises `GraphPPError` if `keep` is no number of bytes, `root` no path, or the folder no cache but has folders.
    """
    path = _path(root)
    if not is_cache(path):
        raise GraphPPError(f"{path} is no cache of graphpp, so nothing in it is removed: name another folder")
    if not path.exists():
        return []
    cache = DiskCache(path)
    if keep == 0:
        cache.remove_tables()
    return cache.shrink(keep)


def _path(root: str | os.PathLike[str] | None) -> Path:
    return default_folder() if root is None else Path(root)
