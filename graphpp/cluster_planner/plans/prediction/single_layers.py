"""Single layers of a setting: recomputed ones, and those that computations gather one by one (`keep=0`).

The first layers of a stage are recomputed: a backward runs from the last layer to the first, so the values of the other layers
are freed before the recomputed ones are made. A layer belongs to the stage in which it starts.
`passes/stage/gather_layers.py` makes computations that gather: during a layer, the next layer is gathered and the previous
one's gradients are reduced, in sequence on one link. The first gather and the last reduction are not hidden. Each computation
also makes the values of its parameters alone, such as weights in float8. The first stage sends no input gradients, so its I is
empty, and its W reads and makes as much as B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
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
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import LayerBytes

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_BY_SEGMENT = ("layers", "offloadable")


def layers_of_stages(costs: ModelCosts, cut: Cut) -> list[list[int]]:
    """By stage, the layers that start there, as the numbers of their first segments."""
    ends = [*cut[1:], len(costs.starts)]
    return [[layer for layer in costs.layers if first <= layer < end] for first, end in zip(cut, ends, strict=True)]


def layer_names(costs: ModelCosts, setting: PlanSetting, cut: Cut) -> tuple[str, ...]:
    """The FQNs of the layers that `setting.recomputed` covers."""
    return tuple(costs.names[layer] for layer in _recomputed(costs, setting.recomputed, cut)) if setting.recomputed else ()


def priced_setting(request: PlanRequest, setting: PlanSetting, cut: Cut, ahead: bool = False) -> PricedModel:
    """The segment costs of a setting, of which some are recomputed; each segment on the group of its stage. `ahead`: with the
    costs behind an R too."""
    groups = request.groups(setting)
    each = {group: priced_on(request, setting, cut, group, ahead) for group in sorted(set(groups))}
    if len(each) == 1:
        return each[groups[0]]
    bounds = pairwise((*cut, len(request.costs.starts)))
    return _joined([each[group] for group, (first, end) in zip(groups, bounds, strict=True) for _ in range(first, end)])


def priced_on(request: PlanRequest, setting: PlanSetting, cut: Cut, group: int, ahead: bool = False) -> PricedModel:
    """The segment costs of a setting, all on one group of the machines."""
    again = request.priced(setting.shape, setting.rows, setting.recompute, group)
    if setting.recomputed is None and not ahead:
        return again
    plain, costs = request.priced(setting.shape, setting.rows, None, group), request.costs
    chosen: Collection[int] = range(len(costs.starts))
    if setting.recomputed is not None:
        chosen = {at for layer in _recomputed(costs, setting.recomputed, cut) for at in _segments_of(costs, layer)}
    found = _joined([again if at in chosen else plain for at in range(len(costs.starts))], plain)
    if not ahead:
        return found
    pairs = zip(found.segments.costs.stages, plain.segments.costs.stages, strict=True)
    stages = tuple(_with_ahead(own, usual) if at in chosen else own for at, (own, usual) in enumerate(pairs))
    return replace(found, segments=replace(found.segments, costs=replace(found.segments.costs, stages=stages)))


def _joined(each: Sequence[PricedModel], base: PricedModel | None = None) -> PricedModel:
    """The first price, or `base`, with each segment of its own one."""
    base = base or each[0]
    mixed: dict[str, Any] = {name: tuple(getattr(one, name)[at] for at, one in enumerate(each)) for name in _BY_SEGMENT}
    stages = tuple(one.segments.costs.stages[at] for at, one in enumerate(each))
    costs = replace(base.segments.costs, stages=stages, hidden=min(one.segments.costs.hidden for one in each))
    return replace(base, segments=replace(base.segments, costs=costs), **mixed)


def _with_ahead(own: StageCosts, plain: StageCosts) -> StageCosts:
    """The costs of a segment that recomputes, with an R that makes the values which `plain` saves."""
    peaks = {**plain.peak_bytes, Kind.F: max(plain.saved_bytes, plain.peak_bytes.get(Kind.F, 0))}
    seconds = max(0.0, own.lines(Kind.B).in_sequence - plain.lines(Kind.B).in_sequence)
    return replace(own, ahead=plain.behind(seconds, peaks))


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
    """The stages of a cut in which each computation gathers its layers. `machines`: of each stage; `width`: bytes of a gradient
    as sent over those of a gradient as computed."""

    machines: Sequence[Machines]
    shape: MeshShape
    priced: PricedModel
    cut: Cut
    width: float = 1.0

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
        both = [(one.read + self.width * one.made, one.expert_read + self.width * one.expert_made) for one in each]
        return sum(plain * own + experts * of_experts for own, of_experts in both)

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
        machines = self.machines[stage]
        gathers = [self._seconds(machines, one.read, one.expert_read) for one in each]
        sums = [self._seconds(machines, round(self.width * one.made), round(self.width * one.expert_made)) for one in each]
        slower = machines.contention(self.shape.shards, self.shape.shard_stride)
        waited = gathers[0] + sums[-1] + sum(one.derived for one in each)
        for at, segment in enumerate(segments[: len(each)]):
            beside = (gathers[at + 1] if at + 1 < len(gathers) else 0.0) + (sums[at - 1] if at else 0.0)
            computed = self.priced.segments.costs.stages[segment].lines(kind).in_sequence
            waited += max(slower * beside, beside - computed)
        return waited

    @cached_property
    def _seconds(self) -> Callable[[Machines, int, int], float]:
        """Seconds to gather or reduce-scatter these plain and expert bytes; both take equal time."""
        shape = self.shape

        @cache  # most layers have equally many bytes
        def seconds(machines: Machines, plain: int, experts: int) -> float:
            gather = machines.all_gather
            of_experts = gather(experts, shape.dp_shard, shape.stride("dp_shard")) if shape.dp_shard > 1 else 0.0
            return of_experts + (gather(plain, shape.shards, shape.shard_stride) if shape.shards > 1 else 0.0)

        return seconds

    def _most(self, stage: int, kind: Kind) -> LayerBytes:
        each = self._layers(stage, kind)
        whole = [nbytes for one in each if (nbytes := one.read + one.expert_read)]
        made = max(max(one.made, one.expert_made) for one in each)
        return LayerBytes(max([*whole, *map(sum, pairwise(whole))], default=0), made, round(self.width * made))
