"""The tables of a pipeline for numbers of stages and microbatches (`microbatch_count.py`).

Contract
    in   a schedule as the caller gave it, numbers of stages and microbatches
    out  `CheckedTable`: a table that `graphpp.schedules.check.checker` accepted, also with sends and receives, and facts about
         it. Each is made and checked once per number of stages and microbatches
    `ScheduleError` where the schedule does not fit the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import ScheduleLike, default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import MessageFlow
from graphpp.schedules.table.schedule import Schedule

_KEPT = 4  # tables; a table of 64 ranks and 512 microbatches takes 40 MB with its sends


@dataclass(frozen=True)
class ShardPolicy:
    """How sharded stages are whole: at most `keep` of a rank's stages at once, or all (None)."""

    keep: int | None


@dataclass(frozen=True, eq=False)
class CheckedTable:
    """A table that was accepted: `plain` as the schedule made it, `running` with its sends and receives.

    `training`: whether a step runs the table. An evaluation runs the forwards of it. `shards`: which stages are whole at a
    time, where their parameters are sharded; None where each rank holds the whole parameters of its stages. `flow`: how long
    the transport of the ranks holds messages.
    """

    plain: Schedule
    training: bool
    shards: ShardPolicy | None = None
    flow: MessageFlow = MessageFlow()

    @cached_property
    def running(self) -> Schedule:
        """The table that the ranks run: in evaluation the forwards only; with sends and receives, and with sharded stages."""
        table = self.plain if self.training else self.plain.forward_only()
        sent = table if table.has_communication else add_send_recv(table)
        placed = sent if self.shards is None else place_shards(sent, self.shards.keep)
        return hoist_receives(placed, self.flow.ahead)

    @cached_property
    def text(self) -> list[str]:
        """The lines of the table that the ranks run, after its name and counts: ranks compare them."""
        return str(self.running).splitlines()[1:]

    @property
    def splits_backward(self) -> bool:
        """Whether any backward stands as an input gradient (I) and a weight gradient (W)."""
        return bool(self.plain.kinds & {Kind.I, Kind.W})

    def recomputed_stages(self, by_option: bool) -> Sequence[frozenset[int]]:
        """For each microbatch the stages whose backward computes values of the forward again.

        A table that names them decides; else all stages do where `by_option` is true, the caller having given `recompute`.
        """
        pairs, count = self.plain.recomputed, self.plain.microbatches
        if pairs is None:
            return [frozenset(range(self.plain.stages) if by_option else ())] * count
        stages: dict[int, set[int]] = defaultdict(set)
        for stage, microbatch in pairs:
            stages[microbatch].add(stage)
        return [frozenset(stages.get(microbatch, ())) for microbatch in range(count)]

    def forward_orders(self) -> dict[int, list[int]]:
        """The microbatches of each stage's forwards, in the order in which the stage runs them."""
        orders: dict[int, list[int]] = defaultdict(list)
        for _, _, action in self.plain.cells():
            for leaf in action.leaves:
                if leaf.kind is Kind.F:
                    orders[leaf.stage].append(leaf.microbatch or 0)
        return orders


class Tables:
    """Makes and keeps the tables of one pipeline: those of the latest counts."""

    def __init__(
        self,
        source: ScheduleLike,
        ranks: int,
        shards: ShardPolicy | None = None,
        flow: MessageFlow = MessageFlow(),  # noqa: B008 - a frozen value
    ) -> None:
        self._source, self._ranks, self._shards, self._flow = source, ranks, shards, flow
        self._built = lru_cache(_KEPT)(partial(make_table, source, ranks))
        self.checked = lru_cache(_KEPT)(self._checked)

    def admits(self, microbatches: int) -> bool:
        """Whether the schedule has a table for so many microbatches, on its usual number of stages."""
        try:
            table = self._built(default_stages(self._source, self._ranks), microbatches)
        except ScheduleError:
            return False
        return table.microbatches == microbatches  # a table that was given has one number

    def _checked(self, stages: int, microbatches: int, training: bool) -> CheckedTable:
        """The table for these counts. Raises `ScheduleError` where it cannot be made, or cannot run, or cannot train."""
        given = self._source
        if isinstance(given, Schedule) and given.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule {given.name!r} is for {given.microbatches} microbatches, this step has {microbatches}: "
                f"cut the batch into {given.microbatches}, or give a name or a function, which makes a table for any."
            )
        table = self._built(stages, microbatches)
        trains = bool(table.kinds - {Kind.F})
        if training and not trains:
            raise ScheduleError(
                f"the schedule {table.name!r} has forwards only: call pipe.eval, and leave out example=, or give a schedule "
                "with backwards to train."
            )
        check(table, ranks=self._ranks, stages=stages, microbatches=microbatches, training=trains)
        return CheckedTable(table, training, self._shards, self._flow)
