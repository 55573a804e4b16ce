"""Place UNSHARD, RESHARD and REDUCE_GRAD in a table, for stages whose parameters are sharded over the ranks.

- `keep`: how many whole stages a rank may have at once (None: all; 0: none: computations gather and reduce single layers, and
  the table stays unchanged). UNSHARD comes before the first computation of a stage, and again after each RESHARD; RESHARD where
  another stage needs the room, and after the stage's last computation; REDUCE_GRAD after its last backward. Stages that have
  some of these already keep them.
- The stage whose next computation is farthest away makes room (Belady's replacement: no choice has fewer gathers). RESHARD
  comes right after the last computation that reads the stage, directly followed by the UNSHARD of the stage that takes its
  room, so that the gather overlaps with other stages' computations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import BACKWARDS, PER_STAGE, Action, Kind
from graphpp.schedules.table.schedule import Schedule


class _Held(NamedTuple):
    """A whole stage: the column of its latest computation so far, and of its next one (infinite: none)."""

    latest: int
    next: float


def place_shards(table: Schedule, keep: int | None) -> Schedule:
    """The table with the actions of sharded stages.

    Raises `ScheduleError` if `keep` is less than the stages of one overlapped action, or if the table already has UNSHARDs.
    """
    shards = {(action.stage, action.kind) for _, _, action in table.cells() if action.kind in PER_STAGE}
    placed = {stage for stage, kind in shards if kind is not Kind.REDUCE_GRAD}
    reduced = {stage for stage, kind in shards if kind is Kind.REDUCE_GRAD}
    if placed and keep is not None:
        raise ScheduleError(
            f"parallel.keep={keep}: the schedule {table.name!r} says itself when stages are whole ({min(placed)}UNSHARD): "
            "leave one of the two out"
        )
    if keep == 0:
        return table
    rows = enumerate(table.table)
    found = (_placed([action for action in row if action is not None], placed, reduced, keep, rank) for rank, row in rows)
    return replace(table, table=tuple(map(tuple, found)))


def _placed(
    row: Sequence[Action], placed: AbstractSet[int], reduced: AbstractSet[int], keep: int | None, rank: int
) -> list[Action]:
    """A row with the actions of all stages that are not in `placed`, or have no REDUCE_GRAD in `reduced`."""
    computed = {at: dict.fromkeys(leaf.stage for leaf in action.leaves) for at, action in enumerate(row) if action.is_compute}
    uses = {at: [stage for stage in stages if stage not in placed] for at, stages in computed.items()}
    before, behind = _moves({at: each for at, each in uses.items() if each}, keep, rank)
    last = {leaf.stage: at for at, action in enumerate(row) for leaf in action.leaves if leaf.kind in BACKWARDS}
    for stage, at in last.items():
        if stage not in reduced:
            behind[at].insert(0, Action(stage, Kind.REDUCE_GRAD))
    found = list(before)
    for at, action in enumerate(row):
        found += [action, *behind[at]]
    return found


def _moves(uses: Mapping[int, Sequence[int]], keep: int | None, rank: int) -> tuple[list[Action], dict[int, list[Action]]]:
    """The UNSHARDs before the first action, and the moves behind each column; `uses`: the stages of each computation."""
    columns: dict[int, list[int]] = defaultdict(list)
    for at, stages in uses.items():
        for stage in stages:
            columns[stage].append(at)
    before: list[Action] = []
    behind: dict[int, list[Action]] = defaultdict(list)
    room = len(columns) if keep is None else keep
    following = {stage: iter([*each[1:], inf]) for stage, each in columns.items()}
    held: dict[int, _Held] = {}
    left: dict[int, int] = {}  # stage -> the column behind which it was resharded
    for at, stages in uses.items():
        for stage in (stage for stage in stages if stage not in held):
            if len(held) < room:
                before.append(Action(stage, Kind.UNSHARD))
            else:
                gone = _farthest(held, stages, room, rank)
                left[gone] = held.pop(gone).latest
                behind[left[gone]].append(Action(gone, Kind.RESHARD))
                behind[max(left[gone], left.get(stage, 0))].append(Action(stage, Kind.UNSHARD))
            held[stage] = _Held(at, at)
        for stage in stages:
            held[stage] = _Held(at, next(following[stage]))
    for stage, each in held.items():
        behind[each.latest].append(Action(stage, Kind.RESHARD))
    return before, behind


def _farthest(held: Mapping[int, _Held], needed: Sequence[int], room: int, rank: int) -> int:
    """The stage to reshard: of the stages not needed now, the one whose next computation comes last."""
    free = [stage for stage in held if stage not in needed]
    if not free:
        raise ScheduleError(
            f"parallel.keep={room}: rank {rank} computes with {len(needed)} stages at once in this schedule: keep as many"
        )
    return max(free, key=lambda stage: held[stage].next)

