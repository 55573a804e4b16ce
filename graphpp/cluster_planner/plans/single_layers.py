"""Single layers of a setting: those that are recomputed, and those that computations gather one after the other (`keep=0`).

Contract
    `priced_setting`: the costs of the segments, of which some are recomputed; `layer_names`: the FQNs of the recomputed layers
    `LayerGathers`: by stage and kind of computation the seconds, the most bytes of single layers and the bytes that a rank
    sends, where each computation gathers its layers

The first layers of a stage are recomputed: a backward runs from the last layer to the first, so the others' values are gone
when theirs are made. A layer belongs to the stage in which it starts.
`passes/stage/gather_layers.py` makes computations that gather: while a layer computes, the next one is gathered and the
gradients of the one before are summed, one after the other on one line. Nothing hides the first gather and the last sum. The
first stage sends no gradients on, so its I is empty, and its W reads and makes as much as B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from graphpp.cluster_planner.costs.cost_data import CostData
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


def layers_of_stages(costs: CostData, cut: Cut) -> list[list[int]]:
    """By stage, the layers that start there; a layer is the number of its first segment."""
    ends = [*cut[1:], len(costs.starts)]
    return [[layer for layer in costs.layers if first <= layer < end] for first, end in zip(cut, ends, strict=True)]


def layer_names(costs: CostData, setting: PlanSetting, cut: Cut) -> tuple[str, ...]:
    """The FQNs of the layers that a setting with `recomputed` computes a second time."""
    return tuple(costs.names[layer] for layer in _recomputed(costs, setting.recomputed, cut)) if setting.recomputed else ()


def priced_setting(request: PlanRequest, setting: PlanSetting, cut: Cut) -> PricedModel:
    """The costs of the segments for a setting."""
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


def _recomputed(costs: CostData, counts: Sequence[int], cut: Cut) -> list[int]:
    return [layer for count, layers in zip(counts, layers_of_stages(costs, cut), strict=True) for layer in layers[:count]]


def _segments_of(costs: CostData, layer: int) -> range:
    """The segments of a layer: where a stage may start within layers, those of the modules that it calls as well."""
    inside, end = f"{costs.names[layer]}.", layer + 1
    while end < len(costs.names) and costs.names[end].startswith(inside):
        end += 1
    return range(layer, end)


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

    def sent(self, table: Schedule) -> float:
        """The bytes that the rank with most sends along its data ranks in a step."""
        found: list[float] = []
        for row in table.table:
            computed = (action for action in row if action is not None and action.is_compute)
            counts = Counter((leaf.stage, leaf.kind) for action in computed for leaf in action.leaves)
            found.append(sum(times * self._sent(*key) for key, times in counts.items()))
        return max(found)

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
        """The seconds in which plain bytes and those of experts are gathered, or reduce-scattered, which takes as long."""
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
