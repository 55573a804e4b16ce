"""`graphpp cache list|empty`: the folder of compiled regions (`cache/contents.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpp.cache.contents import Listing, clear, entries
from graphpp.cache.disk_cache import default_folder
from graphpp.cli.command import Answer, add_command
from graphpp.cli.forms import read_bytes
from graphpp.errors import GraphPPError

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The folder of the cache; by default that of GRAPHPP_CACHE, or the user's own."),
]


def add_to(root: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show and empty the folder of compiled regions.")
    root.add_typer(group, name="cache")
    add_command(group, "list")(list_entries)
    add_command(group, "empty")(empty)


def list_entries(folder: Folder = None) -> Answer:
    """List the entries with their bytes and the time of their last use, and their number and bytes in all."""
    root = _folder(folder)
    found = Listing(root, tuple(entries(root)))
    return Answer(str(found), found.document())


def empty(
    folder: Folder = None,
    keep: Annotated[str, typer.Option(help="Leave the entries used last, up to so many bytes, e.g. 2GiB.")] = "0",
) -> Answer:
    """Remove the entries, the one used longest ago first. An entry that a process has open stays."""
    root = _folder(folder)
    found = Listing(root, tuple(clear(root, keep=read_bytes("--keep", keep))), removed=True)
    return Answer(str(found), found.document())


def _folder(folder: Path | None) -> Path:
    """The given folder, if it is not a file; None: the user's default."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise GraphPPError(f"--folder: {folder} is no folder")
    return folder or default_folder()
