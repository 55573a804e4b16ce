"""`debug=`: dumps of graphs, and how graphs are captured and kept in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graphpp.arguments import COUNT, FLAG, INDEX, or_none
from graphpp.options.option import Group, Option, group_reader, read_folder


def _read_dump(form: object) -> Path | None:
    return read_folder(form if form is not None else os.environ.get("GRAPHPP_DUMP") or None)


@dataclass(frozen=True)
class Debug(Group):
    """Dumps of graphs, and how graphs are captured and kept in memory. Raises `GraphPPError` for values of other types."""

    prefix: ClassVar[str] = "debug"

    dump: Option[str | os.PathLike[str] | None, Path | None] = Option(
        None,
        read=_read_dump,
        describe=None,  # may differ between ranks
        takes="the path of a folder",
        about="The folder for dumps of graphs, plan and schedule. None: the variable `GRAPHPP_DUMP`, if it is set.",
    )
    max_graphs: Option[int, int] = Option(
        16,
        read=COUNT,
        about="How many captured graphs a pipeline keeps in memory, one per kind of microbatch and mode of the model; the "
        "least recently used one is dropped first.",
    )
    audit: Option[int | None, int | None] = Option(
        None,
        read=or_none(INDEX),
        about="How often model and loss run on fake tensors, to find changes of state that is not watched. 1: in each call of "
        "a graph; n: in each n-th; 0: never. None: in the calls 2, 4, 8, .. of a graph, and then so rarely that audits take at "
        "most 0.5 % of the time.",
    )
    dynamic: Option[bool | None, bool | None] = Option(
        None,
        read=or_none(FLAG),
        about="Whether one captured graph serves microbatches of several sizes. None: the sizes that vary from call to call, "
        "from their second value on. True: all sizes, from the first call on. False: no size, and no number.",
    )


DebugLike = Debug | str | os.PathLike[str] | None
read_debug = group_reader(Debug, "dump", lambda form: isinstance(form, str | os.PathLike))
