"""The tables of a pipeline for numbers of stages and microbatches.

Contract
    in   a schedule as the caller gave it, numbers of stages and microbatches
    out  `CheckedTable`: a table that `graphpp.schedules.check.checker` accepted; made and checked once per pair of numbers
    `ScheduleError` if the schedule does not admit the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import ScheduleLike, default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import MessageFlow
from graphpp.schedules.table.recompute_marks import Pairs
from graphpp.schedules.table.schedule import Schedule

_KEPT = 4  # tables; a table of 64 ranks and 512 microbatches takes 40 MB with its sends


@dataclass(frozen=True)
class ShardPolicy:
    """Sharded stages: at most `keep` of a rank's stages are whole at once (None: all)."""

    keep: int | None


@dataclass(frozen=True, eq=False)
class CheckedTable:
    """An accepted table: `plain` as the schedule made it, `running` with sends and receives. `training`: False runs only its
    forwards. `shards`: None if parameters are not sharded. `flow`: how long the transport buffers messages."""

    plain: Schedule
    training: bool
    shards: ShardPolicy | None = None
    flow: MessageFlow = MessageFlow()

    @cached_property
    def running(self) -> Schedule:
        """The table that the ranks run: forwards only in evaluation; with sends and receives, and gathers of sharded stages."""
        table = self.plain if self.training else self.plain.forward_only()
        sent = table if table.has_communication else add_send_recv(table)
        placed = sent if self.shards is None else place_shards(sent, self.shards.keep)
        return hoist_receives(placed, self.flow.ahead)

    @cached_property
    def text(self) -> list[str]:
        """The lines of the running table without its name and numbers, which ranks compare."""
        return str(self.running).splitlines()[1:]

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into an input gradient (I) and a weight gradient (W)."""
        return bool(self.plain.kinds & {Kind.I, Kind.W})

    def recomputed_stages(self, by_option: bool) -> Sequence[frozenset[int]]:
        """For each microbatch, the stages whose backward recomputes forward values.

        A table that names these stages decides; else all stages if `by_option` (the caller gave `recompute`), or none. Stages
        with an R always recompute.
        """
        pairs, count = self.plain.recomputed, self.plain.microbatches
        if pairs is None:
            pairs = frozenset(product(range(self.plain.stages if by_option else 0), range(count)))
        return _by_microbatch(pairs | self.plain.recomputed_ahead, count)

    def stages_ahead(self) -> Sequence[frozenset[int]]:
        """For each microbatch, the stages that have an R."""
        return _by_microbatch(self.plain.recomputed_ahead, self.plain.microbatches)

    def forward_orders(self) -> dict[int, list[int]]:
        """The microbatches of each stage's forwards, in execution order."""
        orders: dict[int, list[int]] = defaultdict(list)
        for _, _, action in self.plain.cells():
            for leaf in action.leaves:
                if leaf.kind is Kind.F:
                    orders[leaf.stage].append(leaf.microbatch or 0)
        return orders


def _by_microbatch(pairs: Pairs, count: int) -> list[frozenset[int]]:
    stages: dict[int, set[int]] = defaultdict(set)
    for stage, microbatch in pairs:
        stages[microbatch].add(stage)
    return [frozenset(stages.get(microbatch, ())) for microbatch in range(count)]


class Tables:
    """Makes and caches the tables of one pipeline."""

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
        return table.microbatches == microbatches  # a given table has one number

    def _checked(self, stages: int, microbatches: int, training: bool) -> CheckedTable:
        """The table for these numbers. Raises `ScheduleError` if it cannot be made, run or used for training."""
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
