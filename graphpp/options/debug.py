"""`debug=`: dumps of graphs, and how graphs are captured and kept in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graphpp.arguments import COUNT, FLAG, or_none, shown
from graphpp.errors import GraphPPError
from graphpp.options.option import Group, Option, group_reader, read_folder, reader_of


def _read_copies(form: object) -> bool:
    if form is None:
        return os.environ.get("GRAPHPP_COPY_LAYERS") != "0"
    if not isinstance(form, bool):
        raise GraphPPError(f"take True, False or None, got {shown(form)}")
    return form


def _read_dump(form: object) -> Path | None:
    return read_folder(form if form is not None else os.environ.get("GRAPHPP_DUMP") or None)


@dataclass(frozen=True)
class Debug(Group):
    """Dumps of graphs, and how graphs are captured and kept in memory. Raises `GraphPPError` for values of other types."""

    prefix: ClassVar[str] = "debug"

    dump: Option[str | os.PathLike[str] | None, Path | None] = Option(
        None,
        read=_read_dump,
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
    copy_layers: Option[bool | None, bool] = Option(
        None,
        read=_read_copies,
        describe=None,  # the first rank alone captures
        takes="True, False",
        about="Whether of 6 and more equal layers two are traced with their backward and the others copied, which captures a "
        "large model in half of the time. The graph is the same. None: yes, unless the variable `GRAPHPP_COPY_LAYERS` is 0.",
    )


DebugLike = Debug | str | os.PathLike[str] | None
read_debug = group_reader(Debug, "dump", lambda form: isinstance(form, str | os.PathLike))
