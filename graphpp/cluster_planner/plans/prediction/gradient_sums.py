"""What the parameters of each stage cost beside its computations: gathers, reductions, and sums of gradients.

- A stage's gather, and its reduction over the ranks that share its rows and over their copies, are actions of the table, which
  other stages hide.
- With `keep=0`, computations contain the gathers and reductions of their layers (`single_layers.py`). Rows of gradients are
  added over `dp_replicate` and `cp` after the last backward, so nothing hides these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.devices import Machines
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import StageCosts
from graphpp.schedules.table.state_bytes import StateBytes


@dataclass(frozen=True)
class SharedSeconds:
    """By stage, seconds of a gather, of a reduction, and of the sums over copies of the rows at the end of a step."""

    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    copies: tuple[float, ...]


def shared_seconds(
    machines: Machines,
    shape: MeshShape,
    stages: int,
    state: Sequence[StateBytes],
    experts: Sequence[bool],
    *,
    layers: bool,
) -> SharedSeconds:
    """`experts`: whether each piece of state belongs to experts; `layers`: computations gather single layers."""
    gathers, reductions, copies = ([0.0] * stages for _ in range(3))
    for one, expert in zip(state, experts, strict=True):
        ranks, stride = (shape.dp_shard, shape.stride("dp_shard")) if expert else (shape.shards, shape.stride("ep"))
        sent = one.sums if one.sent is None else one.sent
        over_copies = sum(
            machines.all_reduce(sent // ranks, size, shape.stride(name))
            for name in ("dp_replicate", "cp")
            if (size := getattr(shape, name)) > 1
        )
        shared = ranks > 1 and not layers
        gather = machines.all_gather(one.weights, ranks, stride) if shared else 0.0
        reduce = machines.reduce_scatter(sent, ranks, stride) if shared else 0.0
        for stage in one.readers:
            gathers[stage] += gather
        for stage in one.makers:
            reductions[stage] += reduce + (0.0 if layers else over_copies)
            copies[stage] += over_copies if layers else 0.0
    return SharedSeconds(tuple(gathers), tuple(reductions), tuple(copies))


def with_sums(
    stages: Sequence[StageCosts], state: Sequence[StateBytes], machines: Machines, microbatches: int
) -> tuple[StageCosts, ...]:
    """The stages with the kernels that add a microbatch's weight gradients to the sums of earlier ones. Compiled programs add
    within their matrix products."""
    seconds = [0.0] * len(stages)
    for one in state:
        for stage in one.makers:
            seconds[stage] += (1 - 1 / microbatches) * machines.slowest * machines.device.seconds(0.0, 2 * one.sums, "")
    return tuple(
        replace(each, backward=each.of(Kind.B) + more, weight_grad=each.weight_grad + more)
        for each, more in zip(stages, seconds, strict=True)
    )
