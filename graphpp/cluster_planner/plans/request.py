"""The request that a search answers: a model, machines and a batch, with caches of segment costs and cuts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.large_heads import has_head, is_tied, with_logits_tokens, with_word_parts
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.price import PricedModel, priced
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.settings import PlanSetting, RecomputeWord
from graphpp.devices import Machines
from graphpp.planner.balance import balanced
from graphpp.planner.segments import Cut
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import StageCosts

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
    """`batch`: rows of a step on all ranks; `tokens`: of a row; `dtype`: in which the model computes (None: its own); `usual`:
    what all settings have alike, such as the optimizer and the kernels; `turns`: a cache of `estimate.py`, by mesh shape.
    `fixed`: how many of the first and of the last segments are stages of their own; `of_head`: whether `costs` are those of
    another head."""

    costs: ModelCosts
    machines: Machines
    batch: int
    tokens: int
    dtype: str | None = "bfloat16"
    usual: Deployment = Deployment()
    fixed: tuple[int, int] = (0, 0)
    of_head: bool = False
    turns: dict[MeshShape, float] = field(default_factory=dict, repr=False)
    _priced: dict[object, PricedModel] = field(default_factory=dict, repr=False)
    _alike: dict[tuple[int, ...], PricedModel] = field(default_factory=dict, repr=False)
    _totals: dict[object, ModelTotals] = field(default_factory=dict, repr=False)
    _stages: dict[object, CutStages] = field(default_factory=dict, repr=False)
    _by_head: dict[tuple[int, int | None], PlanRequest] = field(default_factory=dict, repr=False)

    def on(self, machines: Machines) -> PlanRequest:
        """This request on other machines."""
        return PlanRequest(self.costs, machines, self.batch, self.tokens, self.dtype, self.usual)

    def of(self, setting: PlanSetting) -> PlanRequest:
        """This request, or for a setting with another head the request with its costs."""
        parts = setting.shape.pp if setting.word_parts else 0
        key = parts, setting.logits_tokens
        if key == (0, None) or self.of_head:
            return self
        if key not in self._by_head:
            fixed = parts if is_tied(self.costs) else 0, parts
            costs = with_word_parts(self.costs, parts) if parts else with_logits_tokens(self.costs, setting.logits_tokens or 0)
            question = self.machines, self.batch, self.tokens, self.dtype, self.usual
            self._by_head[key] = PlanRequest(costs, *question, fixed=fixed, of_head=True)
        return self._by_head[key]

    def can_take_pieces(self, setting: PlanSetting) -> bool:
        """Whether the head can compute the logits of some tokens at a time."""
        return setting.shape.tp == 1 and not setting.word_parts and has_head(self.costs)

    def may_take_pieces(self, shape: MeshShape, rows: int, cap: int) -> bool:
        """Whether the head's peak is a large part of the bytes that a rank may hold."""
        if shape.tp > 1 or not has_head(self.costs):
            return False
        return max(self.priced(shape, rows, None).segments.costs.stages[-1].peak_bytes.values()) > cap / _LARGE

    def stages_of_words(self, shape: MeshShape) -> int:
        """How many more stages a model has if the words of its head are cut."""
        return (shape.pp - 1) * (1 + is_tied(self.costs))

    def can_cut_words(self, shape: MeshShape, stages: int) -> bool:
        """Whether each rank can have a part of the head's words."""
        more = stages > shape.pp * (2 if is_tied(self.costs) else 1)
        return shape.pp > 1 and shape.tp == 1 and has_head(self.costs) and more

    def may_cut_words(self, shape: MeshShape, rows: int, stages: int) -> bool:
        """Whether the head takes longer than a stage on average, and each rank can have a part of its words."""
        if not self.can_cut_words(shape, stages):
            return False
        each = [part.forward + part.of(Kind.B) for part in self.priced(shape, rows, None).segments.costs.stages]
        return each[-1] > sum(each) / stages

    def priced(self, shape: MeshShape, rows: int, recompute: RecomputeWord) -> PricedModel:
        """The segment costs for one microbatch on one rank, without messages between stages."""
        key = _key(shape, rows, recompute)
        if key not in self._priced:
            degrees = shape.tp, shape.ep, shape.cp, shape.folded
            tp, ep, cp, folded = degrees
            deployment = replace(self.usual, rows=rows, tp=tp, ep=ep, cp=cp, folded=folded, recompute=recompute)
            self._priced[key] = priced(self.costs, self.machines, deployment, self._alike.get(degrees))
            self._alike.setdefault(degrees, self._priced[key])
        return self._priced[key]

    def stages(self, setting: PlanSetting) -> CutStages:
        """The cut with the lightest heaviest stage."""
        key = _key(setting.shape, setting.rows, setting.recompute)
        found = self._stages.get((key, setting.stages))
        if found is None:
            priced = self.priced(setting.shape, setting.rows, setting.recompute)
            if key not in self._totals:
                self._totals[key] = _totals(priced)
            found = self._stages[key, setting.stages] = _cut(priced, setting.stages, self._totals[key], self.fixed)
        return found


def overlap_of(priced: PricedModel, keep: int | None) -> float:
    """The time of an overlapped F and B over their sum, if all stages are alike."""
    if keep == 0:  # computations gather single layers, so F and B run in sequence
        return 1.0
    costs = priced.segments.costs
    total, exchanged = (
        sum(of(part, kind) for part in costs.stages for kind in (Kind.F, Kind.B))
        for of in (StageCosts.of, StageCosts.own_collectives)
    )
    return 1 - costs.hidden * min(exchanged, total - exchanged) / total if total else 1.0


def _key(shape: MeshShape, rows: int, recompute: RecomputeWord) -> object:
    return shape.tp, shape.ep, shape.cp, shape.folded, rows, recompute


def _cut(priced: PricedModel, stages: int, totals: ModelTotals, fixed: tuple[int, int]) -> CutStages:
    before, after = fixed
    each = [(part.forward, part.input_grad, part.weight_grad) for part in priced.segments.costs.stages]
    last = len(each) - after
    body = balanced(list(map(sum, each[before:last])), stages - before - after)
    cut = (*range(before), *(before + first for first in body), *range(last, len(each)))
    ends = [*cut[1:], len(each)]
    added = [tuple(map(sum, zip(*each[first:end], strict=True))) for first, end in zip(cut, ends, strict=True)]
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
