"""Tables in which all recomputed pairs (stage, microbatch) have an R, or none has: the computations alone.

    r0 0F0 0F1 0B0 0B1      <->     r0 0F0 0F1 0R0 0B0 0R1 0B1
"""

from __future__ import annotations

from dataclasses import replace

from graphpp.schedules.rewrite.split_backward import without_overlaps
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.recompute_marks import Pairs
from graphpp.schedules.table.schedule import Schedule


def without_recompute(schedule: Schedule, recomputed: Pairs) -> Schedule:
    """The computations without Rs; `recomputed` recompute within their B or I."""
    rows = (tuple(leaf for leaf in row if leaf and leaf.kind is not Kind.R) for row in without_overlaps(schedule).table)
    return replace(schedule, table=tuple(rows), recomputed=recomputed)


def with_recompute(schedule: Schedule, recomputed: Pairs) -> Schedule:
    """The computations with an R directly before each B or I of `recomputed`."""
    plain = without_recompute(schedule, recomputed)
    rows = (tuple(each for leaf in row if leaf for each in _ahead(leaf, recomputed)) for row in plain.table)
    return replace(plain, table=tuple(rows))


def _ahead(leaf: Action, recomputed: Pairs) -> tuple[Action, ...]:
    backward = leaf.kind in (Kind.B, Kind.I) and leaf[:3:2] in recomputed
    return (leaf._replace(kind=Kind.R), leaf) if backward else (leaf,)
