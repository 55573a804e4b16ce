"""The plan of sharded parameters: gathers, reductions and bytes sent in a step. `memory_plan.py` plans their memory.

Contract
    in   the table that the ranks run, the number of shards, and the bytes that a rank sends to gather and to reduce each stage;
         with `keep=0`, the stage programs of each microbatch with their `LayerTraffic`
    out  `ShardPlan`. `layer_bytes`: by stage and kind of computation, the most bytes of single layers at once
    A parameter of several stages counts in each. Padded rows count, because they are sent. If ranks send unequal parts of a
    gradient that they do not divide evenly, the mean counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphpp.errors import ScheduleError
from graphpp.runtime.program import LayerTraffic, Phase, PipelineProgram
from graphpp.schedules.check.shard_counts import ShardCounts, shard_counts
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Row, Schedule
from graphpp.schedules.table.state_bytes import LayerBytes
from graphpp.units import spell_bytes

_BREADTH_FIRST = "LoopedBFS"
_OFTEN = 2  # gathers of a stage in a step


@dataclass(frozen=True)
class RankShards:
    """One rank's step: gathers and reductions per stage, and the bytes that the rank sends for them."""

    rank: int
    gathers: float
    reductions: float
    sent: int

    @property
    def words(self) -> str:
        return (
            f"rank {self.rank}: a stage is gathered {self.gathers:g} times and reduced {self.reductions:g} times a step; "
            f"dp_shard sends {spell_bytes(self.sent)}"
        )


@dataclass(frozen=True)
class ShardPlan:
    """The cost of sharding over `shards` ranks. `advice`: a schedule with fewer gathers, or ""."""

    shards: int
    ranks: tuple[RankShards, ...]
    advice: str = ""

    @classmethod
    def of(
        cls, running: Schedule, gathered: Sequence[float], reduced: Sequence[float], shards: int, keep: int | None
    ) -> ShardPlan:
        """The plan of a table with gathers and reductions; `gathered`, `reduced`: bytes sent, by stage."""
        counts = shard_counts(running)
        ranks = [
            RankShards(rank, each.gathers_per_stage, each.reductions_per_stage, round(each.sent(gathered, reduced)))
            for rank, each in enumerate(counts)
        ]
        return cls(shards, tuple(ranks), _advice(running, counts, keep))

    def __str__(self) -> str:
        lines = [each.words for each in self.ranks]
        return "\n".join([f"parameters sharded over {self.shards} ranks", *lines, *filter(None, [self.advice])])


def _advice(running: Schedule, counts: Sequence[ShardCounts], keep: int | None) -> str:
    """A comparison with the breadth-first schedule, if this one gathers a stage more than twice."""
    most = max((each.gathers_per_stage for each in counts), default=0.0)
    if most <= _OFTEN or keep is None:
        return ""
    try:
        other = make_table(_BREADTH_FIRST, running.ranks, running.stages, running.microbatches)
    except ScheduleError:  # the breadth-first schedule does not admit these numbers
        return ""
    fewer = max(each.gathers_per_stage for each in shard_counts(place_shards(other, keep)))
    found = f"keep={keep} gathers a stage up to {most:g} times a step under {running.name}"
    if fewer >= most:
        return f"{found}: a larger keep gathers less often"
    return f"{found}; schedule={_BREADTH_FIRST!r} would gather {fewer:g} times, and keep the activations of all microbatches"


# ---------------------------------------------------------------------------------- single layers (keep=0)


@dataclass(frozen=True)
class RankLayers(RankShards):
    """One rank's step: gathers and reductions of single layers, and the most bytes of whole parameters at once."""

    whole: int = 0

    @property
    def words(self) -> str:
        return (
            f"rank {self.rank}: single layers are gathered {self.gathers:g} times and reduced {self.reductions:g} times a "
            f"step, and {spell_bytes(self.whole)} are whole at most; dp_shard sends {spell_bytes(self.sent)}"
        )


def layer_plan(running: Schedule, programs: Sequence[PipelineProgram], shards: int) -> ShardPlan:
    """The plan of a step; `programs`: one per microbatch."""
    return ShardPlan(shards, tuple(_of_row(rank, row, programs) for rank, row in enumerate(running.table)))


def layer_bytes(programs: Sequence[PipelineProgram]) -> dict[tuple[int, Kind], LayerBytes]:
    """By stage and kind, the most bytes of single layers in any microbatch."""
    found: dict[tuple[int, Kind], LayerBytes] = {}
    for stage in {id(stage): stage for program in programs for stage in program.stages}.values():
        for phase, item in stage.programs.items():
            kind, layers = Kind.F if phase is Phase.EVALUATE else Kind(phase.value), item.layers or LayerTraffic()
            before = found.get((stage.index, kind), LayerBytes())
            found[stage.index, kind] = LayerBytes(
                whole=max(before.whole, layers.whole),
                gradients=max(before.gradients, *layers.sums, 0),
                sent=max(before.sent, *layers.reductions, 0),
            )
    return found


def _of_row(rank: int, row: Row, programs: Sequence[PipelineProgram]) -> RankLayers:
    traffic = list(_traffic(row, programs))
    gathers, reductions = sum(len(each.gathers) for each in traffic), sum(len(each.reductions) for each in traffic)
    sent = round(sum(each.sent for each in traffic))
    return RankLayers(rank, gathers, reductions, sent, max((each.whole for each in traffic), default=0))


def _traffic(row: Row, programs: Sequence[PipelineProgram]) -> Iterator[LayerTraffic]:
    """The traffic of each computation of a row."""
    for leaf in (leaf for action in row if action is not None and action.is_compute for leaf in action.leaves):
        phases = programs[leaf.microbatch or 0].stages[leaf.stage].programs
        item = phases.get(Phase(leaf.kind.value)) or phases[Phase.EVALUATE]
        if item.layers is not None:
            yield item.layers
