"""The seconds and bytes of computations that gather one layer at a time (`keep=0`).

Contract
    in   the costs of the segments, which are the layers; a cut; the machines and the shape of the mesh
    out  by stage and kind of computation: seconds, the most bytes of single layers (`LayerBytes`), the bytes that a rank sends
    `passes/stage/gather_layers.py` makes these computations: while a layer computes, the next one is gathered, and the
    gradients of the one before are summed over the ranks, one after the other on one line. The first gather and the last sum
    hide behind nothing. The first stage sends no gradients on, so its I is empty, and its W reads and makes what B does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

from graphpp.cluster_planner.costs.price import PhaseBytes, PricedModel
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.devices import Machines
from graphpp.planner.segments import Cut
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import LayerBytes

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class LayerGathers:
    """The stages of a cut, each kind of computation of which gathers its layers."""

    machines: Machines
    shape: MeshShape
    priced: PricedModel
    cut: Cut

    def costs(self, costs: Costs) -> Costs:
        """The costs of the stages, with the seconds that no computation hides."""
        stages = []
        for stage, own in enumerate(costs.stages):
            forward, backward, first, second = (own.of(kind) + self._unhidden(stage, kind) for kind in _KINDS)
            stages.append(replace(own, forward=forward, backward=backward, input_grad=first, weight_grad=second))
        return replace(costs, stages=tuple(stages))

    def bytes(self) -> dict[tuple[int, Kind], LayerBytes]:
        """By stage and kind the most bytes of single layers at once: of a layer and the next one, and of its gradients."""
        return {(stage, kind): self._most(stage, kind) for stage in range(len(self.cut)) for kind in _KINDS}

    def collections(self, table: Schedule) -> tuple[int, float]:
        """How many computations a rank runs, and the bytes that it sends along its data ranks; each of the rank with most."""
        found: list[tuple[int, float]] = []
        for row in table.table:
            computed = (action for action in row if action is not None and action.is_compute)
            counts = Counter((leaf.stage, leaf.kind) for action in computed for leaf in action.leaves)
            found.append((counts.total(), sum(times * self._sent(*key) for key, times in counts.items())))
        runs, sent = zip(*found, strict=True)
        return max(runs), max(sent)

    def _sent(self, stage: int, kind: Kind) -> float:
        """The bytes that a rank sends along its data ranks in a computation."""
        plain, experts = ((ranks - 1) / ranks for ranks in (self.shape.shards, self.shape.dp_shard))
        each = self._layers(stage, kind)
        return sum(plain * (one.read + one.made) + experts * (one.expert_read + one.expert_made) for one in each)

    def _segments(self, stage: int, kind: Kind) -> Sequence[int]:
        """The segments of a stage in the order in which they compute."""
        ends = [*self.cut[1:], len(self.priced.layers)]
        own = range(self.cut[stage], ends[stage])
        return own if kind is Kind.F else own[::-1]

    def _layers(self, stage: int, kind: Kind) -> list[PhaseBytes]:
        """The parameters and gradients of a stage's segments, in the order in which the segments compute."""
        if stage == 0 and kind is Kind.I:
            return [PhaseBytes()]
        runs = Kind.B if stage == 0 and kind is Kind.W else kind
        return [self.priced.layers[at][runs] for at in self._segments(stage, kind)]

    def _unhidden(self, stage: int, kind: Kind) -> float:
        """The seconds for which a computation waits for its gathers and sums."""
        segments, each = self._segments(stage, kind), self._layers(stage, kind)
        gathers = [self._seconds(one.read, one.expert_read) for one in each]
        sums = [self._seconds(one.made, one.expert_made) for one in each]
        waited = gathers[0] + sums[-1]
        for at, segment in enumerate(segments[: len(each)]):
            beside = (gathers[at + 1] if at + 1 < len(gathers) else 0.0) + (sums[at - 1] if at else 0.0)
            waited += max(0.0, beside - self.priced.segments.costs.stages[segment].of(kind))
        return waited

    @cached_property
    def _seconds(self) -> Callable[[int, int], float]:
        """The seconds in which plain bytes and those of experts are gathered, or summed: a reduce-scatter takes the steps of an
        all-gather. Most layers have equally many."""
        shape, gather = self.shape, self.machines.all_gather

        @cache
        def seconds(plain: int, experts: int) -> float:
            of_experts = gather(experts, shape.dp_shard, shape.stride("dp_shard")) if shape.dp_shard > 1 else 0.0
            return of_experts + (gather(plain, shape.shards, shape.stride("ep")) if shape.shards > 1 else 0.0)

        return seconds

    def _most(self, stage: int, kind: Kind) -> LayerBytes:
        each = self._layers(stage, kind)
        whole = [nbytes for one in each if (nbytes := one.read + one.expert_read)]
        made = max(max(one.made, one.expert_made) for one in each)
        return LayerBytes(max([*whole, *map(sum, pairwise(whole))], default=0), made, made)
