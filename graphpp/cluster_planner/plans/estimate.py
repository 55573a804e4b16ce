"""Estimate a setting's seconds and bytes within microseconds, to order the settings before simulation.

An `Estimate` is no bound. It uses the formulas of the schedules' papers for equal stages without messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graphpp.cluster_planner.plans.request import ModelTotals, PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting


class Estimate(NamedTuple):
    """Seconds of a step, and bytes of the fullest rank."""

    seconds: float
    nbytes: float


class _Work(NamedTuple):
    """A rank's work for one microbatch: seconds of F, I and W; the pipeline's ranks; the stages per rank."""

    forward: float
    input_grad: float
    weight_grad: float
    ranks: int
    per_rank: int

    @property
    def whole(self) -> float:
        return self.forward + (self.input_grad + self.weight_grad)


_IDLE: dict[str, Callable[[_Work], float]] = {
    "auto": lambda work: 0.0,
    "1F1B": lambda work: work.whole,
    "ZB1P": lambda work: work.forward + work.input_grad - work.weight_grad,
    "ZB2P": lambda work: max(0.0, work.forward + work.input_grad - 2 * work.weight_grad),
    "ZBVZeroBubble": lambda work: work.forward / 2,
    "DualPipeV": lambda work: (work.forward + work.input_grad) / 2,
    "V-Half": lambda work: work.forward,
    "V-Min": lambda work: work.forward + work.input_grad,
    "Interleaved1F1B": lambda work: work.whole / work.per_rank,
    "MegatronInterleaved": lambda work: work.whole / work.per_rank,
    "LoopedBFS": lambda work: work.whole / work.per_rank,
    "InterleavedZeroBubble": lambda work: (work.forward + work.input_grad - work.weight_grad) / work.per_rank,
}
"""Idle seconds of the pipeline per rank beyond the first, by schedule."""
_ALIVE: dict[str, Callable[[PlanSetting], float]] = {
    "ZB2P": lambda setting: 2 * setting.shape.pp - 1,
    "V-Half": lambda setting: setting.shape.pp / 2 + 1,
    "V-Min": lambda setting: setting.shape.pp / 3 + 1,
    "DualPipeV": lambda setting: setting.shape.pp + 1,
    "LoopedBFS": lambda setting: setting.microbatches,
    "Interleaved1F1B": lambda setting: _of_groups(setting, setting.shape.pp),
    "InterleavedZeroBubble": lambda setting: _of_groups(setting, setting.shape.pp),
    "MegatronInterleaved": lambda setting: _of_groups(setting, setting.schedule.group or setting.shape.pp),
}
"""Microbatches whose activations the first rank holds, by schedule; for other schedules, the number of ranks."""
_ALTERNATING = 1.4  # gathers of a stage per microbatch, as `check/shard_counts.py` counts them for interleaved tables
_STAY = 2  # forwards of a stage with values on the device, at least: one is being copied out, one is copied back
_SPLIT = ("ZB1P", "ZB2P", "ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min", "InterleavedZeroBubble")
_IN_CYCLES = ("V-Half", "V-Min")  # assume equal F, I and W; otherwise the longest sets half of the pace
_IN_A_V = ("ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min")


def _of_groups(setting: PlanSetting, group: int) -> float:
    """The activations of interleaved 1F1B: all chunks of a group but one, and a warm-up of two microbatches per rank."""
    per_rank = setting.schedule.stages_per_rank
    return group * (per_rank - 1) / per_rank + 2 * setting.shape.pp / per_rank


def estimate(request: PlanRequest, setting: PlanSetting) -> Estimate:
    request, shape, per_rank = request.of(setting), setting.shape, setting.schedule.stages_per_rank
    cut = request.stages(setting)
    forward, first, second = (part * per_rank for part in cut.heaviest)
    work = _Work(forward, first, second, shape.pp, per_rank)
    idle = _IDLE.get(setting.schedule.name, _IDLE["1F1B"])(work) * (shape.pp - 1)
    computed = setting.microbatches * _pace(request, setting, work) + idle
    alive = _alive(setting)
    turn = request.turns.get(shape)  # equal for all rows, recomputations and schedules
    if turn is None:
        turn = request.turns[shape] = _seconds_of_turn(request, setting, cut.totals)
    collected = _turns(setting) * turn
    if setting.keep == 0:  # each computation waits for its first layer only
        computed += min(1.0, setting.stages / len(request.costs.starts)) * collected
    seconds = max(computed, collected)
    saved = cut.totals.saved_split if setting.schedule.name in _SPLIT else cut.totals.saved
    caps = request.caps(shape, 0)  # on unlike devices, stages that fill all of them alike are assumed
    lacking = max(caps) - sum(caps) / len(caps)
    return Estimate(seconds, (_held(request, setting, cut.totals) + alive * saved) / shape.pp + lacking)


def with_offload(request: PlanRequest, setting: PlanSetting, guess: Estimate, cap: int) -> Estimate | None:
    """The estimate with just the offload that the cap needs; None if none is needed or all is not enough."""
    link, totals = request.machines.host, request.of(setting).stages(setting).totals
    if link is None or guess.nbytes <= cap:
        return None
    one = totals.offloadable / setting.shape.pp  # of one microbatch on a rank
    most = one * max(0.0, _alive(setting) - _STAY / setting.schedule.stages_per_rank)
    if guess.nbytes - most > cap:
        return None
    copied = 2 * setting.microbatches * one * (guess.nbytes - cap) / most
    return Estimate(max(guess.seconds, link.seconds(copied)), cap)


def _alive(setting: PlanSetting) -> float:
    alive = _ALIVE.get(setting.schedule.name)
    return min(setting.microbatches, setting.shape.pp if alive is None else alive(setting))


def _pace(request: PlanRequest, setting: PlanSetting, work: _Work) -> float:
    """Seconds from one microbatch to the next."""
    if setting.keep != 0 and (setting.schedule.name == "DualPipeV" or setting.schedule.name not in _SPLIT):
        alone, paired = request.priced(setting.shape, setting.rows, setting.recompute).paces
        return work.whole * (paired if setting.schedule.name == "DualPipeV" else alone)
    if setting.schedule.name in _IN_CYCLES:
        return (work.whole + 3 * max(work.forward, work.input_grad, work.weight_grad)) / 2
    return work.whole


def _turns(setting: PlanSetting) -> float:
    """Gathers of a stage per step: one for each turn, except for the `keep` stages that stay whole."""
    per_rank, keep = setting.schedule.stages_per_rank, setting.keep
    if keep is None or keep >= per_rank:
        return 1.0
    if keep == 0:  # each forward and backward gathers all layers
        return 2.0 * setting.microbatches
    grouped = {"LoopedBFS": setting.microbatches} | dict.fromkeys(_IN_A_V, 1)
    group = grouped.get(setting.schedule.name, setting.schedule.group or setting.shape.pp)
    turns = 2 * max(1.0, setting.microbatches / group)
    if keep == 1 and group < setting.microbatches:  # forwards and backwards of different stages alternate, and evict each other
        return turns + _ALTERNATING * (setting.microbatches - group)
    return turns * (1 - keep / per_rank) + keep / per_rank


def _seconds_of_turn(request: PlanRequest, setting: PlanSetting, totals: ModelTotals) -> float:
    """Seconds to gather all stages of a rank once, and to reduce them every second time."""
    shape = setting.shape
    experts = totals.expert_rows / max(1, totals.rows + totals.expert_rows)  # their share of the parameters
    seconds = 0.0
    for share, ranks, along in ((experts, shape.dp_shard, "dp_shard"), (1 - experts, shape.shards, "ep")):
        weights, sums = (share * nbytes / shape.pp for nbytes in (totals.weights, totals.whole - totals.weights))
        if ranks > 1:
            stride = shape.stride(along)
            seconds += max(
                group.all_gather(weights, ranks, stride) + group.reduce_scatter(sums, ranks, stride) / 2
                for group in request.machines.groups
            )
    return seconds


def _held(request: PlanRequest, setting: PlanSetting, totals: ModelTotals) -> float:
    """Bytes of parameters, gradients and optimizer on all ranks of a pipeline."""
    share = 1.0 if setting.keep is None else min(1.0, setting.keep / setting.schedule.stages_per_rank)
    if setting.keep == 0:  # two layers per rank
        share = min(1.0, 2 * setting.shape.pp / len(request.costs.starts))
    sharded = totals.rows / setting.shape.shards + totals.expert_rows / setting.shape.dp_shard
    return share * totals.whole + sharded + totals.buffers
