"""Seconds of parameters and gradients beside the computations of a stage: gathers, reductions, and sums.

- A stage's gather, its reduction over the ranks that share its rows, and the average of whole gradients are actions of the
  table, which other stages hide.
- Rows of gradients are added over `dp_replicate` and `cp` from the reduction of the next stage on, so nothing hides the sums of
  the two stages that a rank reduces last, and with `keep=0` nothing hides any.
- In the order of the ranks, each of three copies or more adds up a part, and sends it to the others after the last backward
  (`ordered_sums`), so nothing hides that half of the sum.
- With `keep=0`, computations contain the gathers and reductions of their layers (`single_layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.devices import Machines
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import StageCosts
from graphpp.schedules.table.state_bytes import StateBytes

_LATE = 2  # stages of a rank: the sums over copies of one start with the reduction of the next
_NO_ORDER = 2  # copies whose sum does not depend on the order


@dataclass(frozen=True)
class SharedSeconds:
    """By stage, seconds of a gather, of a reduction, and of the sums over copies of the rows that nothing hides. `contention`:
    the seconds that computations lose per second of a gather or reduction beside them, in the mean."""

    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    copies: tuple[float, ...]
    contention: float


def shared_seconds(
    machines: Machines, setting: PlanSetting, state: Sequence[StateBytes], experts: Sequence[bool], sum_order: str = "ranks"
) -> SharedSeconds:
    """The seconds of a step under a setting. `experts`: whether each piece of state belongs to experts; `sum_order`: as
    `Parallel(sum_order=)`."""
    shape, layers = setting.shape, setting.keep == 0
    late = 1.0 if layers else min(1.0, _LATE / setting.schedule.stages_per_rank)
    gathers, reductions, copies = ([0.0] * setting.stages for _ in range(3))
    total = lost = 0.0
    for one, expert in zip(state, experts, strict=True):
        ranks, stride = (shape.dp_shard, shape.stride("dp_shard")) if expert else (shape.shards, shape.shard_stride)
        sent = one.sums if one.sent is None else one.sent
        shared = ranks > 1 and not layers
        gather = machines.all_gather(one.weights, ranks, stride) if shared else 0.0
        reduce = machines.reduce_scatter(sent, ranks, stride) if shared else 0.0
        parts = [(len(one.readers) * gather + len(one.makers) * reduce, ranks, stride)]
        over = shape.copies_of_experts if expert else shape.copies
        ordered = sum_order == "ranks" and prod(getattr(shape, name) for name in over) > _NO_ORDER
        for size, apart in ((getattr(shape, name), shape.stride(name)) for name in over):
            over_copies = machines.all_reduce(sent // ranks, size, apart) if size > 1 else 0.0
            first = late if ranks > 1 else 0.0  # of the sums, of the stages that are reduced last
            shown = (first + (1 - first) * (0.5 if ordered else 0.0)) * over_copies
            reduce += over_copies - shown
            parts.append((len(one.makers) * (over_copies - shown), size, apart))
            for stage in one.makers:
                copies[stage] += shown
        for stage in one.readers:
            gathers[stage] += gather
        for stage in one.makers:
            reductions[stage] += reduce
        total += sum(seconds for seconds, *_ in parts)
        lost += sum(seconds * machines.contention(*group) for seconds, *group in parts)
    return SharedSeconds(tuple(gathers), tuple(reductions), tuple(copies), lost / total if total else 0.0)


def shared_on(
    machines: Sequence[Machines], setting: PlanSetting, state: Sequence[StateBytes], experts: Sequence[bool], sum_order: str
) -> SharedSeconds:
    """As `shared_seconds`, with the machines of each stage. `contention` is that of the machines where it is largest."""
    found = list[SharedSeconds]()
    for group in {id(each): each for each in machines}.values():
        here = {stage for stage, each in enumerate(machines) if each is group}
        pairs = [pair for pair in zip(state, experts, strict=True) if not here.isdisjoint(pair[0].readers)]
        own = [replace(one, readers=_among(here, one.readers), makers=_among(here, one.makers)) for one, _ in pairs]
        found.append(shared_seconds(group, setting, own, [expert for _, expert in pairs], sum_order))
    each = ((one.gathers for one in found), (one.reductions for one in found), (one.copies for one in found))
    gathers, reductions, copies = (tuple(map(sum, zip(*of_groups, strict=True))) for of_groups in each)
    return SharedSeconds(gathers, reductions, copies, max(one.contention for one in found))


def _among(stages: Set[int], users: Sequence[int]) -> tuple[int, ...]:
    return tuple(stage for stage in users if stage in stages)


def with_sums(
    stages: Sequence[StageCosts], state: Sequence[StateBytes], machines: Sequence[Machines], microbatches: int
) -> tuple[StageCosts, ...]:
    """The stages with the kernels that add a microbatch's weight gradients to the sums of earlier ones. Compiled programs add
    within their matrix products. `machines`: of each stage."""
    seconds = [0.0] * len(stages)
    for one in state:
        nbytes = 2 * one.sums + one.weights  # a gradient is as large as the weights in computation
        for stage in one.makers:
            own = machines[stage]
            seconds[stage] += (1 - 1 / microbatches) * own.slowest * own.device.seconds(0.0, nbytes, "")
    return tuple(map(_longer, stages, seconds))


def _longer(each: StageCosts, more: float) -> StageCosts:
    ahead = None if each.ahead is None else _longer(each.ahead, more)
    return replace(each, backward=each.of(Kind.B) + more, weight_grad=each.weight_grad + more, ahead=ahead)
