"""The request that a search answers: a model, machines and a batch, with caches of segment costs and cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from graphpp.cluster_planner.costs.deployment import REDUCED, Deployment
from graphpp.cluster_planner.costs.large_heads import with_logits_tokens, with_word_parts
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.price import PricedModel, priced
from graphpp.cluster_planner.plans.mesh_shapes import MeshLimits, MeshShape, mesh_shapes
from graphpp.cluster_planner.plans.settings import PlanSetting, RecomputeWord
from graphpp.devices import Machines, MixedMachines
from graphpp.planner.balance import balanced_on
from graphpp.planner.segments import Cut
from graphpp.schedules.table.actions import Kind

_LARGE = 8  # a head in pieces is tried where the whole one peaks at this part of the cap


class ModelTotals(NamedTuple):
    """Bytes of a whole model. `whole`: parameters and gradient sums; `rows`, `expert_rows`: shards, their gradient sums and
    optimizer of other parameters and of experts; `saved`, `saved_split`: of one microbatch for a whole backward, and the most
    for a split one."""

    weights: int
    whole: int
    rows: int
    expert_rows: int
    buffers: int
    saved: int
    saved_split: int
    offloadable: int


class CutStages(NamedTuple):
    """`cut`: the first segment of each stage; `heaviest`: F, I and W of the heaviest stage, or the mean of a rank that has a
    part of the words; `totals`: of the model."""

    cut: Cut
    heaviest: tuple[float, float, float]
    totals: ModelTotals


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """`batch`: rows of a step on all ranks; `tokens`: of a row; `dtype`: in which the model computes (None: its own). Each
    pipeline rank is on one group of `machines`; groups are numbered from 0. `usual`: what all settings have alike, such as the
    optimizer and the kernels; `turns`: a cache of `estimate.py`, by mesh shape; `timed`: one of `predict_step.py`. `fixed`: how
    many of the first and of the last segments are stages of their own; `of_head`: whether `costs` are those of another head."""

    costs: ModelCosts
    machines: Machines | MixedMachines
    batch: int
    tokens: int
    dtype: str | None = "bfloat16"
    usual: Deployment = Deployment()
    fixed: tuple[int, int] = (0, 0)
    of_head: bool = False
    turns: dict[MeshShape, float] = field(default_factory=dict, repr=False)
    timed: dict[object, Any] = field(default_factory=dict, repr=False)
    _priced: dict[object, PricedModel] = field(default_factory=dict, repr=False)
    _alike: dict[tuple[int, ...], PricedModel] = field(default_factory=dict, repr=False)
    _totals: dict[object, ModelTotals] = field(default_factory=dict, repr=False)
    _stages: dict[object, CutStages] = field(default_factory=dict, repr=False)
    _by_head: dict[tuple[int, int | None], PlanRequest] = field(default_factory=dict, repr=False)

    def on(self, machines: Machines | MixedMachines) -> PlanRequest:
        """This request on other machines."""
        return PlanRequest(self.costs, machines, self.batch, self.tokens, self.dtype, self.usual)

    def shapes(self, limits: MeshLimits, sizes: Mapping[str, int]) -> Iterator[MeshShape]:
        """The meshes for all GPUs whose pipeline ranks lie within one group each. `sizes`: fixed ones."""
        each = mesh_shapes(self.machines.gpus, self.batch, limits, sizes)
        return (shape for shape in each if all(group.gpus % shape.stride("pp") == 0 for group in self.machines.groups))

    def groups_of_ranks(self, shape: MeshShape) -> Sequence[int]:
        """The group of each pipeline rank."""
        if isinstance(self.machines, Machines):
            return [0] * shape.pp
        return [self.machines.group_of(rank * shape.stride("pp")) for rank in range(shape.pp)]

    def groups(self, setting: PlanSetting) -> Sequence[int]:
        """The group of each stage."""
        if len(self.machines.groups) == 1:
            return [0] * setting.stages
        of_rank = self.groups_of_ranks(setting.shape)
        return [of_rank[rank] for rank in setting.schedule.homes(setting.shape.pp)]

    def caps(self, shape: MeshShape, cap: int) -> Sequence[int]:
        """Bytes that each pipeline rank may hold: on mixed machines the cap of its group."""
        if isinstance(self.machines, Machines):
            return [cap] * shape.pp
        return [self.machines.caps[group] for group in self.groups_of_ranks(shape)]

    @property
    def reduced_width(self) -> float:
        """The bytes of a gradient as sent over those of a gradient as computed."""
        own, sent = self.costs.dtype, self.usual.reduce_dtype
        return REDUCED[sent or own] / REDUCED[own] if own in REDUCED else 1.0

    def of(self, setting: PlanSetting) -> PlanRequest:
        """This request, or for a setting with another head the request with its costs."""
        parts = setting.shape.pp if setting.word_parts else 0
        key = parts, setting.logits_tokens
        if key == (0, None) or self.of_head:
            return self
        if key not in self._by_head:
            fixed = parts if self.costs.ties_head else 0, parts
            costs = with_word_parts(self.costs, parts) if parts else with_logits_tokens(self.costs, setting.logits_tokens or 0)
            question = self.machines, self.batch, self.tokens, self.dtype, self.usual
            self._by_head[key] = PlanRequest(costs, *question, fixed=fixed, of_head=True)
        return self._by_head[key]

    def can_take_pieces(self, setting: PlanSetting) -> bool:
        """Whether the head can compute the logits of some tokens at a time."""
        return setting.shape.tp == 1 and not setting.word_parts and self.costs.has_head

    def may_take_pieces(self, shape: MeshShape, rows: int, cap: int) -> bool:
        """Whether the head's peak is a large part of the bytes that a rank may hold."""
        if shape.tp > 1 or not self.costs.has_head:
            return False
        return max(self.priced(shape, rows, None).segments.costs.stages[-1].peak_bytes.values()) > cap / _LARGE

    def stages_of_words(self, shape: MeshShape) -> int:
        """How many more stages a model has if the words of its head are cut."""
        return (shape.pp - 1) * (1 + self.costs.ties_head)

    def can_cut_words(self, shape: MeshShape, stages: int) -> bool:
        """Whether each rank can have a part of the head's words."""
        more = stages > shape.pp * (2 if self.costs.ties_head else 1)
        return shape.pp > 1 and shape.tp == 1 and self.costs.has_head and more

    def may_cut_words(self, shape: MeshShape, rows: int, stages: int) -> bool:
        """Whether the head takes longer than a stage on average, and each rank can have a part of its words."""
        if not self.can_cut_words(shape, stages):
            return False
        each = [part.forward + part.of(Kind.B) for part in self.priced(shape, rows, None).segments.costs.stages]
        return each[-1] > sum(each) / stages

    def priced(self, shape: MeshShape, rows: int, recompute: RecomputeWord, group: int = 0) -> PricedModel:
        """The segment costs for one microbatch on one rank, without messages between stages. Only seconds differ by group."""
        key = _key(shape, rows, recompute), group
        if key not in self._priced:
            degrees = shape.tp, shape.ep, shape.cp, shape.folded
            tp, ep, cp, folded = degrees
            deployment = replace(self.usual, rows=rows, tp=tp, ep=ep, cp=cp, folded=folded, recompute=recompute)
            self._priced[key] = priced(self.costs, self.machines.groups[group], deployment, self._alike.get(degrees))
            self._alike.setdefault(degrees, self._priced[key])
        return self._priced[key]

    def stages(self, setting: PlanSetting) -> CutStages:
        """The cut with the lightest heaviest stage."""
        key, groups = _key(setting.shape, setting.rows, setting.recompute), tuple(self.groups(setting))
        found = self._stages.get((key, groups))
        if found is None:
            indices = range(len(self.machines.groups))
            each = [self.priced(setting.shape, setting.rows, setting.recompute, group) for group in indices]
            if key not in self._totals:
                self._totals[key] = _totals(each[0])
            found = self._stages[key, groups] = _cut(each, groups, self._totals[key], self.fixed)
        return found


def _key(shape: MeshShape, rows: int, recompute: RecomputeWord) -> object:
    return shape.tp, shape.ep, shape.cp, shape.folded, rows, recompute


def _cut(priced: Sequence[PricedModel], groups: Sequence[int], totals: ModelTotals, fixed: tuple[int, int]) -> CutStages:
    """`priced`: by group; `groups`: of each stage."""
    (before, after), stages = fixed, len(groups)
    each = [[(part.forward, part.input_grad, part.weight_grad) for part in one.segments.costs.stages] for one in priced]
    last = len(each[0]) - after
    body = balanced_on([list(map(sum, one[before:last])) for one in each], groups[before : stages - after])
    assert body is not None, "no stage has a limit of bytes"
    cut = (*range(before), *(before + first for first in body), *range(last, len(each[0])))
    bounds = pairwise((*cut, len(each[0])))
    added = [
        tuple(map(sum, zip(*each[group][first:end], strict=True))) for group, (first, end) in zip(groups, bounds, strict=True)
    ]
    heaviest = max(added[before : stages - after], key=sum)
    if after:  # each rank has one part of the head, and of a tied embedding; the other stages are as heavy as the heaviest
        per_rank, parts = stages // after, [added[-1], *added[: min(before, 1)]]
        other = per_rank - len(parts)
        heaviest = tuple(sum(each) / per_rank for each in zip(*[heaviest] * other, *parts, strict=True))
    forward, first, second = heaviest
    return CutStages(cut, (forward, first, second), totals)


def _totals(priced: PricedModel) -> ModelTotals:
    rows = [0, 0]
    for one, expert in zip(priced.segments.state, priced.expert_state, strict=True):
        own = one.weights if one.rows is None else one.rows
        sums = one.sums if one.row_sums is None else one.row_sums
        rows[expert] += own + sums + one.optimizer
    state, parts = priced.segments.state, priced.segments.costs.stages
    saved = sum(part.saved_bytes for part in parts), sum(max(part.saved_bytes, part.kept_bytes or 0) for part in parts)
    whole, buffers = sum(one.weights + one.sums for one in state), sum(one.buffers for one in state)
    away = sum(each.nbytes for segment in priced.offloadable for each in segment)
    return ModelTotals(sum(one.weights for one in state), whole, rows[False], rows[True], buffers, *saved, away)
