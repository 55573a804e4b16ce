"""Adds up the parts of gradients that several stages, or the ranks that share a layer, compute: once a step.

- `TiedReduction`: each stage sums its own gradients of a tied parameter over the microbatches (`accumulate.py`). `reduce` adds
  these partial sums in stage order, so every rank with the parameter gets the same bits. A partial sum is broadcast once to
  these ranks, which all call `reduce` once per step and broadcast in the same order.
- `PartialSums`: `add_up` replaces the sums of parameters whose gradients are partial over `tp` by the totals, in place. All
  ranks that share layers call it for the same stages in the same order. Each sum has its own all-reduce, so that the backend
  adds its elements in the order of a gradient that is reduced alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from graphpp.parallel.groups import subgroup


class TiedReduction:
    """Adds the partial sums of tied parameters, on every rank that has one.

    A rank may have a parameter without contributing to its gradient (it reads the parameter under `no_grad`): its copy needs
    the gradient too, to stay equal.
    """

    def __init__(
        self,
        contributors: Mapping[str, Sequence[int]],
        ranks: Mapping[str, Sequence[int]],
        rank_of_stage: Mapping[int, int],
        group: dist.ProcessGroup | None,
    ) -> None:
        """By FQN: `contributors` has the stages that make a gradient of the parameter, `ranks` those of `group` with it."""
        shared = {fqn: stages for fqn, stages in contributors.items() if len(stages) > 1 or len(ranks[fqn]) > 1}
        self.contributors = {fqn: tuple(stages) for fqn, stages in shared.items()}
        self._ranks = {fqn: tuple(ranks[fqn]) for fqn in shared}
        self._rank_of_stage = rank_of_stage
        self._groups = {ranks: subgroup(ranks, group) for ranks in sorted(set(self._ranks.values()))}
        self._rank = 0 if group is None else dist.get_rank(group)

    def reduce(
        self, partial: Callable[[int, str], torch.Tensor], buffer: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The sums of this rank's tied parameters by FQN. `buffer` allocates memory for a remote stage's partial sum."""
        return {fqn: self._total(fqn, partial, buffer) for fqn, ranks in self._ranks.items() if self._rank in ranks}

    def _total(
        self, fqn: str, partial: Callable[[int, str], torch.Tensor], buffer: Callable[[str], torch.Tensor]
    ) -> torch.Tensor:
        stages, ranks = self.contributors[fqn], self._ranks[fqn]
        local = {stage: partial(stage, fqn) for stage in stages if self._rank_of_stage[stage] == self._rank}
        partials = dict(local)
        for stage in stages if len(ranks) > 1 else ():
            partials[stage] = local[stage] if stage in local else buffer(fqn)
            source = ranks.index(self._rank_of_stage[stage])
            dist.broadcast(partials[stage], group=self._groups[ranks], group_src=source)
        total = partials[stages[0]].clone()
        for stage in stages[1:]:
            total.add_(partials[stage])
        return total


class PartialSums:
    """`fqns`: the parameters whose gradients are partial over `group`, the ranks that share layers (None: there are none)."""

    def __init__(self, fqns: Collection[str] = (), group: dist.ProcessGroup | None = None) -> None:
        assert not fqns or group is not None, "partial gradients have ranks that share them"
        self.fqns, self._group = frozenset(fqns), group

    def add_up(self, sums: Mapping[str, torch.Tensor]) -> None:
        works = [
            dist.all_reduce(sums[fqn], group=self._group, async_op=True) for fqn in sorted(self.fqns.intersection(sums))
        ]
        for work in works:
            work.wait()
