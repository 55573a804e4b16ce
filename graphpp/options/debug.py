"""`debug=`: dumps of graphs, and the captured graphs that are kept in memory and on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from graphpp.arguments import COUNT, FLAG, PATH, or_none, shown
from graphpp.errors import GraphPPError
from graphpp.options.option import Group, Option, group_reader, reader_of


def _switch(variable: str, on: bool, about: str) -> Option[bool | None, bool]:
    """An option that takes True, False, or None: `on`, unless the environment variable says otherwise. Ranks may differ."""

    def read(form: object) -> bool:
        if form is None:
            return os.environ.get(variable) != "0" if on else os.environ.get(variable) == "1"
        if not isinstance(form, bool):
            raise GraphPPError(f"take True, False or None, got {shown(form)}")
        return form

    return Option(
        None,
        read=read,
        describe=None,  # the first rank alone captures
        takes="True, False",
        about=f"{about} None: {'yes' if on else 'no'}, unless the variable `{variable}` is {0 if on else 1}.",
    )


def _read_folder(form: object) -> Path | None:
    folder: Any = form if form is not None else os.environ.get("GRAPHPP_DUMP") or None
    if folder is not None and not PATH.accepts(folder):
        raise GraphPPError(f"take the path of a folder, or None, got {shown(form)}")
    return None if folder is None else Path(folder)


@dataclass(frozen=True)
class Debug(Group):
    """Dumps of graphs, and the captured graphs that are kept. Raises `GraphPPError` for values of other types."""

    prefix: ClassVar[str] = "debug"

    dump: Option[str | os.PathLike[str] | None, Path | None] = Option(
        None,
        read=_read_folder,
        describe=None,  # each rank may write where it likes
        takes="the path of a folder",
        about="The folder for dumps of graphs, plan and schedule. None: the variable `GRAPHPP_DUMP`, if it is set.",
    )
    max_graphs: Option[int, int] = Option(
        16,
        read=reader_of(COUNT),
        takes=COUNT.takes,
        about="How many captured graphs a pipeline keeps in memory, one per kind of microbatch and mode of the model; the "
        "least recently used one is dropped first.",
    )
    dynamic: Option[bool | None, bool | None] = Option(
        None,
        read=reader_of(or_none(FLAG)),
        takes="True, False",
        about="Whether one captured graph serves microbatches of several sizes. None: the sizes that vary from call to call, "
        "from their second value on. True: all sizes, from the first call on. False: no size.",
    )
    keep_graphs: Option[bool | None, bool] = _switch(
        "GRAPHPP_KEEP_GRAPHS",
        on=False,
        about="Whether captured graphs are kept in the cache folder for later runs of an unchanged program; experimental.",
    )


DebugLike = Debug | str | os.PathLike[str] | None
read_debug = group_reader(Debug, "dump", lambda form: isinstance(form, str | os.PathLike))
