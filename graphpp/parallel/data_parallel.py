"""Data parallelism beside the pipeline: ranks that hold the same stages train on other data, and average their gradients.

Contract
--------
- A stage's sums of gradients are averaged in place, once per step, over the ranks of the group: from its REDUCE_GRAD on, where
  the schedule has one (the checker proves that no backward follows it), so that the other stages compute meanwhile; else, and
  for tied parameters, whose parts are added first, at the end of the step.
- All ranks of the group run the same table over the same stages, so they ask for the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named
from graphpp.errors import GraphPPError


def check_apart(groups: Iterable[str], replicas: dist.ProcessGroup | None) -> None:
    """Raise where the model itself exchanges values with replicas: parameters there may be different ones (experts)."""
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
    """Averages over a group; None, or a group of one: nothing to do."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._under_way: list[tuple[torch.Tensor, dist.Work]] = []

    def start(self, sums: Iterable[torch.Tensor]) -> None:
        """Start to average these, in place."""
        for total in sums if self._group is not None else ():
            work = dist.all_reduce(total, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((total, work))

    def finish(self) -> None:
        """Wait until what was started is averaged."""
        for total, work in self._under_way:
            work.wait()
            total.div_(dist.get_world_size(self._group))
        self._under_way.clear()

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        self._under_way.clear()
