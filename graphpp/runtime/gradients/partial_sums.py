"""Gradients of which each rank that shares a layer has a part: the parts are added up once a step.

Contract: `add_up(sums)` replaces the sums of such parameters by the totals of all ranks, in place. All ranks that share layers
call it for the same stages in the same order. Each sum is one all-reduce: the backend adds its elements in the order in which
it adds those of a gradient that is reduced alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist


class PartialSums:
    """`fqns`: the parameters whose gradients are partial over `group`, the ranks that share layers (None: there are none)."""

    def __init__(self, fqns: Collection[str] = (), group: dist.ProcessGroup | None = None) -> None:
        assert not fqns or group is not None, "partial gradients have ranks that share them"
        self.fqns, self._group = frozenset(fqns), group

    def add_up(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add the parts of all ranks up, where `sums` has any."""
        works = [
            dist.all_reduce(sums[fqn], group=self._group, async_op=True) for fqn in sorted(self.fqns.intersection(sums))
        ]
        for work in works:
            work.wait()


NO_PARTIAL_SUMS = PartialSums()
