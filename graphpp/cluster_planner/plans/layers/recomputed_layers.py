"""Recomputation by degree: how many layers of each stage are computed a second time, as few as fit into the memory.

Contract
    `priced_setting(question, setting, cut)`: the costs of the segments, of which some are recomputed. `layer_names(..)`: the
    layers that are recomputed where not all are, by FQN, as `graphpp.Recompute(layers=)` takes them

The first layers of a stage are the ones that are recomputed: a backward runs from the last layer to the first, so the others'
values are gone when theirs are made. A layer belongs to the stage in which it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.price import PricedModel
from graphpp.cluster_planner.plans.question import Question
from graphpp.cluster_planner.plans.settings import Setting
from graphpp.planner.segments import Cut


def layers_of_stages(costs: ModelCosts, cut: Cut) -> list[list[int]]:
    """By stage, the layers that start there; a layer is the number of its first segment."""
    ends = [*cut[1:], len(costs.starts)]
    return [[layer for layer in costs.layers if first <= layer < end] for first, end in zip(cut, ends, strict=True)]


def layer_names(costs: ModelCosts, setting: Setting, cut: Cut) -> tuple[str, ...]:
    """The FQNs of the layers that a setting with `recomputed` computes a second time."""
    if setting.recomputed is None:
        return ()
    return tuple(costs.names[layer] for layer in _chosen(costs, setting.recomputed, cut))


def priced_setting(question: Question, setting: Setting, cut: Cut) -> PricedModel:
    """The costs of the segments for a setting."""
    again = question.priced(setting.shape, setting.rows, setting.recompute)
    if setting.recomputed is None:
        return again
    plain = question.priced(setting.shape, setting.rows, None)
    chosen = {at for layer in _chosen(question.costs, setting.recomputed, cut) for at in _segments_of(question.costs, layer)}
    stages, mixed = list(plain.segments.costs.stages), {name: list(getattr(plain, name)) for name in _BY_SEGMENT}
    for at in chosen:
        stages[at] = again.segments.costs.stages[at]
        for name, values in mixed.items():
            values[at] = getattr(again, name)[at]
    by_segment: dict[str, Any] = {name: tuple(values) for name, values in mixed.items()}
    segments = replace(plain.segments, costs=replace(plain.segments.costs, stages=tuple(stages)))
    return replace(plain, segments=segments, **by_segment)


_BY_SEGMENT = ("exchanges", "layers", "offloadable")


def _chosen(costs: ModelCosts, counts: Sequence[int], cut: Cut) -> list[int]:
    return [layer for count, layers in zip(counts, layers_of_stages(costs, cut), strict=True) for layer in layers[:count]]


def _segments_of(costs: ModelCosts, layer: int) -> range:
    """The segments of a layer: where a stage may start within layers, those of the modules that it calls as well."""
    inside, end = f"{costs.names[layer]}.", layer + 1
    while end < len(costs.names) and costs.names[end].startswith(inside):
        end += 1
    return range(layer, end)
