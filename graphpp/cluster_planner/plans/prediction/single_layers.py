"""Single layers of a setting: recomputed ones, and those that computations gather one by one (`keep=0`).

The first layers of a stage are recomputed: a backward runs from the last layer to the first, so the values of the other layers
are freed before the recomputed ones are made. A layer belongs to the stage in which it starts.
`passes/stage/gather_layers.py` makes computations that gather: during a layer, the next layer is gathered and the previous
one's gradients are reduced, in sequence on one link. The first gather and the last reduction are not hidden. The first stage
sends no input gradients, so its I is empty, and its W reads and makes as much as B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.price import PhaseBytes, PricedModel
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.devices import Machines
from graphpp.planner.segments import Cut
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import LayerBytes

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_BY_SEGMENT = ("exchanges", "layers", "offloadable")


def layers_of_stages(costs: ModelCosts, cut: Cut) -> list[list[int]]:
    """By stage, the layers that start there, as the numbers of their first segments."""
    ends = [*cut[1:], len(costs.starts)]
    return [[layer for layer in costs.layers if first <= layer < end] for first, end in zip(cut, ends, strict=True)]


def layer_names(costs: ModelCosts, setting: PlanSetting, cut: Cut) -> tuple[str, ...]:
    """The FQNs of the layers that `setting.recomputed` covers."""
    return tuple(costs.names[layer] for layer in _recomputed(costs, setting.recomputed, cut)) if setting.recomputed else ()


def priced_setting(request: PlanRequest, setting: PlanSetting, cut: Cut) -> PricedModel:
    """The segment costs of a setting, of which some are recomputed."""
    again = request.priced(setting.shape, setting.rows, setting.recompute)
    if setting.recomputed is None:
        return again
    plain, costs = request.priced(setting.shape, setting.rows, None), request.costs
    chosen = {at for layer in _recomputed(costs, setting.recomputed, cut) for at in _segments_of(costs, layer)}
    stages, mixed = list(plain.segments.costs.stages), {name: list(getattr(plain, name)) for name in _BY_SEGMENT}
    for at in chosen:
        stages[at] = again.segments.costs.stages[at]
        for name, values in mixed.items():
            values[at] = getattr(again, name)[at]
    by_segment: dict[str, Any] = {name: tuple(values) for name, values in mixed.items()}
    segments = replace(plain.segments, costs=replace(plain.segments.costs, stages=tuple(stages)))
    return replace(plain, segments=segments, **by_segment)


def _recomputed(costs: ModelCosts, counts: Sequence[int], cut: Cut) -> list[int]:
    return [layer for count, layers in zip(counts, layers_of_stages(costs, cut), strict=True) for layer in layers[:count]]


def recut(costs: ModelCosts, counts: Sequence[int], cut: Cut, other: Cut) -> tuple[int, ...]:
    """The numbers of recomputed layers by stage of another cut, as many in each as there are recomputed ones now."""
    layers = set(_recomputed(costs, counts, cut))
    return tuple(len(layers.intersection(each)) for each in layers_of_stages(costs, other))


def _segments_of(costs: ModelCosts, layer: int) -> range:
    """A layer's segments, including those of modules that it calls, if a stage may start within layers."""
    inside, end = f"{costs.names[layer]}.", layer + 1
    while end < len(costs.names) and costs.names[end].startswith(inside):
        end += 1
    return range(layer, end)


@dataclass(frozen=True)
class LayerGathers:
    """The stages of a cut in which each computation gathers its layers."""

    machines: Machines
    shape: MeshShape
    priced: PricedModel
    cut: Cut

    def costs(self, costs: Costs) -> Costs:
        stages = []
        for stage, own in enumerate(costs.stages):
            forward, backward, first, second = (own.of(kind) + self._unhidden(stage, kind) for kind in _KINDS)
            stages.append(replace(own, forward=forward, backward=backward, input_grad=first, weight_grad=second))
        return replace(costs, stages=tuple(stages))

    def bytes(self) -> dict[tuple[int, Kind], LayerBytes]:
        """By stage and kind, the most bytes of single layers at once: of a layer and the next one, and of its gradients."""
        return {(stage, kind): self._most(stage, kind) for stage in range(len(self.cut)) for kind in _KINDS}

    def sent(self, table: Schedule) -> float:
        found: list[float] = []
        for row in table.table:
            computed = (action for action in row if action is not None and action.is_compute)
            counts = Counter((leaf.stage, leaf.kind) for action in computed for leaf in action.leaves)
            found.append(sum(times * self._sent(*key) for key, times in counts.items()))
        return max(found)

    def _sent(self, stage: int, kind: Kind) -> float:
        plain, experts = ((ranks - 1) / ranks for ranks in (self.shape.shards, self.shape.dp_shard))
        each = self._layers(stage, kind)
        return sum(plain * (one.read + one.made) + experts * (one.expert_read + one.expert_made) for one in each)

    def _segments(self, stage: int, kind: Kind) -> Sequence[int]:
        ends = [*self.cut[1:], len(self.priced.layers)]
        own = range(self.cut[stage], ends[stage])
        return own if kind is Kind.F else own[::-1]

    def _layers(self, stage: int, kind: Kind) -> list[PhaseBytes]:
        if stage == 0 and kind is Kind.I:
            return [PhaseBytes()]
        runs = Kind.B if stage == 0 and kind is Kind.W else kind
        return [self.priced.layers[at][runs] for at in self._segments(stage, kind)]

    def _unhidden(self, stage: int, kind: Kind) -> float:
        """Seconds that a computation waits for gathers and reductions."""
        segments, each = self._segments(stage, kind), self._layers(stage, kind)
        gathers = [self._seconds(one.read, one.expert_read) for one in each]
        sums = [self._seconds(one.made, one.expert_made) for one in each]
        waited, slower = gathers[0] + sums[-1], self.machines.contention(self.shape.shards, self.shape.stride("ep"))
        for at, segment in enumerate(segments[: len(each)]):
            beside = (gathers[at + 1] if at + 1 < len(gathers) else 0.0) + (sums[at - 1] if at else 0.0)
            computed = self.priced.segments.costs.stages[segment].of(kind)
            waited += max(slower * beside, beside - computed)
        return waited

    @cached_property
    def _seconds(self) -> Callable[[int, int], float]:
        """Seconds to gather or reduce-scatter these plain and expert bytes; both take equal time."""
        shape, gather = self.shape, self.machines.all_gather

        @cache  # most layers have equally many bytes
        def seconds(plain: int, experts: int) -> float:
            of_experts = gather(experts, shape.dp_shard, shape.stride("dp_shard")) if shape.dp_shard > 1 else 0.0
            return of_experts + (gather(plain, shape.shards, shape.stride("ep")) if shape.shards > 1 else 0.0)

        return seconds

    def _most(self, stage: int, kind: Kind) -> LayerBytes:
        each = self._layers(stage, kind)
        whole = [nbytes for one in each if (nbytes := one.read + one.expert_read)]
        made = max(max(one.made, one.expert_made) for one in each)
        return LayerBytes(max([*whole, *map(sum, pairwise(whole))], default=0), made, made)
