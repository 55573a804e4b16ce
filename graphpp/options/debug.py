"""`debug=`: dumps of graphs, and the captured graphs that are kept in memory and on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graphpp.errors import GraphPPError
from graphpp.options.option import Group, Option, a_positive_int, group_reader


def _experimental(variable: str, about: str) -> Option[bool | None, bool]:
    """An option that takes True, False, or None for the value of an environment variable. Ranks may differ in it."""

    def read(form: object) -> bool:
        if form is None:
            return os.environ.get(variable, "0") == "1"
        if not isinstance(form, bool):
            raise GraphPPError(f"take True, False or None, got {form!r}")
        return form

    return Option(
        None,
        read=read,
        describe=None,  # the first rank alone captures
        takes="True, False",
        about=f"{about}; experimental. None: no, unless the variable `{variable}` is 1.",
    )


def _read_folder(form: object) -> Path | None:
    folder = form if form is not None else os.environ.get("GRAPHPP_DUMP") or None
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
        raise GraphPPError(f"take the path of a folder, or None, got {form!r}")
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
        read=a_positive_int,
        takes="a positive integer",
        about="How many captured graphs a pipeline keeps in memory, one per shape of microbatch and mode of the model; the "
        "least recently used one is dropped first.",
    )
    keep_graphs: Option[bool | None, bool] = _experimental(
        "GRAPHPP_KEEP_GRAPHS", "Whether captured graphs are kept in the cache folder for later runs of an unchanged program"
    )
    copy_layers: Option[bool | None, bool] = _experimental(
        "GRAPHPP_COPY_LAYERS",
        "Whether of 6 and more equal layers two are traced and the others copied, which captures a large model in less than "
        "half of the time",
    )


DebugLike = Debug | str | os.PathLike[str] | None
read_debug = group_reader(Debug, "dump", lambda form: isinstance(form, str | os.PathLike))
