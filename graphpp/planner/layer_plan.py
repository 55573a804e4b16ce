"""The plan of parameters that programs gather one layer at a time (`keep=0`): gathers, reductions, bytes sent and held.

Contract
    in   the table that the ranks run, the stage programs of each microbatch with their `LayerTraffic`, the number of shards
    out  `layer_plan`: for each rank what it gathers, reduces and sends in a step; `layer_bytes`: for each stage and kind of
         computation the most bytes of single layers at once
    Padded rows count, as they are sent. Of gradients that no number of ranks divides, ranks send unequal parts: their mean
    counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphpp.planner.shard_plan import RankShards, ShardPlan
from graphpp.runtime.program import LayerTraffic, Phase, PipelineProgram
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Row, Schedule
from graphpp.schedules.table.state_bytes import LayerBytes
from graphpp.units import spell_bytes


@dataclass(frozen=True)
class RankLayers(RankShards):
    """One rank's step: all its gathers and reductions of single layers, and the most bytes of whole parameters at once."""

    whole: int = 0

    @property
    def words(self) -> str:
        """One line."""
        return (
            f"rank {self.rank}: single layers are gathered {self.gathers:g} times and reduced {self.reductions:g} times a "
            f"step, and {spell_bytes(self.whole)} are whole at most; dp_shard sends {spell_bytes(self.sent)}"
        )


def layer_plan(running: Schedule, programs: Sequence[PipelineProgram], shards: int) -> ShardPlan:
    """The plan of a step; `programs`: those of each microbatch."""
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
    """What each computation of a row gathers and reduces."""
    for leaf in (leaf for action in row if action is not None and action.is_compute for leaf in action.leaves):
        phases = programs[leaf.microbatch or 0].stages[leaf.stage].programs
        item = phases.get(Phase(leaf.kind.value)) or phases[Phase.EVALUATE]
        if item.layers is not None:
            yield item.layers
