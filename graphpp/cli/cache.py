"""`graphpp cache list|size|empty`: the folder of captured graphs and compiled regions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from graphpp import cache
from graphpp.cli.command import Answer, add_command
from graphpp.cli.forms import read_bytes
from graphpp.errors import GraphPPError
from graphpp.units import spell_bytes

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The folder of the cache; by default that of GRAPHPP_CACHE, or the user's own."),
]


def add_to(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Show and empty the folder of captured graphs and compiled regions.")
    root.add_typer(group, name="cache")
    add_command(group, "list")(list_entries)
    add_command(group, "size")(size)
    add_command(group, "empty")(empty)


def list_entries(folder: Folder = None) -> Answer:
    """List the entries with their bytes and the time of their last use."""
    return _answer(folder, cache.entries(_folder(folder)))


def size(folder: Folder = None) -> Answer:
    """Print the number of entries and their bytes."""
    entries = cache.entries(_folder(folder))
    found = _answer(folder, entries)
    document = {"folder": found.document["folder"], "bytes": found.document["bytes"], "entries": len(entries)}
    return Answer(found.text.splitlines()[-1], document)


def empty(
    folder: Folder = None,
    keep: Annotated[str, typer.Option(help="Leave the entries used last, up to so many bytes, e.g. 2GiB.")] = "0",
) -> Answer:
    """Remove the entries, the one used longest ago first. An entry that a process has open stays."""
    return _answer(folder, cache.clear(_folder(folder), keep=read_bytes("--keep", keep)), removed=True)


def _folder(folder: Path | None) -> Path | None:
    """The folder, if it is one or does not exist yet. Raises `GraphPPError` for a file."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise GraphPPError(f"--folder: {folder} is no folder")
    return folder


def _answer(folder: Path | None, entries: Sequence[cache.Entry], *, removed: bool = False) -> Answer:
    """A line for each entry, then the folder, the number of entries and their bytes."""
    place, nbytes = str(folder or cache.folder()), sum(entry.size for entry in entries)
    used = (time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) for entry in entries)
    lines = [f"{when}  {spell_bytes(each.size):>10}  {each.key}" for when, each in zip(used, entries, strict=True)]
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    total = f"{place}: {count}, {spell_bytes(nbytes)}{' removed' if removed else ''}"
    document = {"folder": place, "bytes": nbytes, "removed": removed, "entries": [asdict(entry) for entry in entries]}
    return Answer("\n".join([*lines, total]), document)
