"""Data parallelism: replicas, ranks that hold the same stages and train on other data, average their gradients.

Contract
--------
- A stage's gradient sums are averaged over the replicas in place, once per step. The all-reduce starts at the stage's
  REDUCE_GRAD action if the schedule has one (the checker proves that no backward follows it), and hides under other stages'
  computation. Otherwise it starts at the end of the step; so it does for tied parameters, whose partial sums are added first.
- All replicas run the same table over the same stages, so they start the same all-reduces in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named
from graphpp.errors import GraphPPError


def check_apart(groups: Iterable[str], replicas: dist.ProcessGroup | None) -> None:
    """Raise `GraphPPError` if a collective of the model reaches a replica, whose parameters may be others (experts).

    `groups`: the names of the process groups of the model's collectives.
    """
    if replicas is None:
        return
    others = set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    for name in groups:
        shared = sorted(others.intersection(dist.get_process_group_ranks(group_named(name))))
        if shared:
            raise GraphPPError(
                f"the model exchanges values with rank {shared[0]} over its process group {name!r}, and the dimension "
                "dp_replicate of mesh= would average all gradients with that rank, also of parameters that are others there "
                "(experts). Leave dp_replicate out, and average the gradients of those parameters that the ranks share "
                "yourself, after each step."
            )


class Replicas:
    """Averages gradients over the ranks of a group; does nothing for None or a group of one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._in_flight: list[tuple[torch.Tensor, dist.Work]] = []

    def start(self, sums: Iterable[torch.Tensor]) -> None:
        """Start to average these sums, in place."""
        for total in sums if self._group is not None else ():
            work = dist.all_reduce(total, group=self._group, async_op=True)
            assert work is not None
            self._in_flight.append((total, work))

    def finish(self) -> None:
        """Wait until all sums that were started are averaged."""
        for total, work in self._in_flight:
            work.wait()
            total.div_(dist.get_world_size(self._group))
        self._in_flight.clear()

    def drop(self) -> None:
        """Forget the all-reduces in flight, after a failure."""
        self._in_flight.clear()
