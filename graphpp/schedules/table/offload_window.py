"""TODO contract."""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.schedules.table.actions import Action


@dataclass(frozen=True)
class Trip:
    """Values of one stage and microbatch that leave and come back together; `nbytes` is the memory that is free meanwhile.

    `gone` and `back` are computing actions of the rank's row, `reader` is the part of one that reads the values first.
    """

    stage: int
    microbatch: int
    values: tuple[str, ...]
    nbytes: int
    gone: Action
    back: Action
    reader: Action
