"""TODO contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from graphpp.parallel.groups import Subgroups


class TiedReduction:
    """Adds the partial sums of the parameters that several stages use, and gives the sum to every rank that holds one.

    A rank may hold a parameter that it only reads without a gradient (under `no_grad`): its copy must be trained all the same.
    """

    def __init__(
        self,
        contributors: Mapping[str, Sequence[int]],
        ranks: Mapping[str, Sequence[int]],
        rank_of_stage: Mapping[int, int],
        subgroups: Subgroups,
    ) -> None:
        """`contributors`: the stages that make a gradient of each parameter; `ranks`: all that hold the parameter."""
        shared = {fqn: stages for fqn, stages in contributors.items() if len(stages) > 1 or len(ranks[fqn]) > 1}
        self.contributors = {fqn: tuple(stages) for fqn, stages in shared.items()}
        self._ranks = {fqn: tuple(ranks[fqn]) for fqn in shared}
        self._rank_of_stage = rank_of_stage
        self._groups = {ranks: subgroups.of(ranks) for ranks in sorted(set(self._ranks.values()))}
        self._rank = subgroups.rank

    def reduce(
        self, partial: Callable[[int, str], torch.Tensor], room: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The full sums of this rank's shared parameters.

        `partial(stage, fqn)` gives a local stage's partial sum, `room(fqn)` memory for another's.
        """
        return {fqn: self._total(fqn, partial, room) for fqn, ranks in self._ranks.items() if self._rank in ranks}

    def _total(
        self, fqn: str, partial: Callable[[int, str], torch.Tensor], room: Callable[[str], torch.Tensor]
    ) -> torch.Tensor:
        stages, ranks = self.contributors[fqn], self._ranks[fqn]
        local = {stage: partial(stage, fqn) for stage in stages if self._rank_of_stage[stage] == self._rank}
        everyone = dict(local)
        for stage in stages if len(ranks) > 1 else ():
            value = local[stage] if stage in local else room(fqn)
            everyone[stage] = self._broadcast(ranks, stage, value)
        total = everyone[stages[0]].clone()
        for stage in stages[1:]:
            total.add_(everyone[stage])
        return total

    def _broadcast(self, ranks: tuple[int, ...], stage: int, value: torch.Tensor) -> torch.Tensor:
        dist.broadcast(value, group=self._groups[ranks], group_src=ranks.index(self._rank_of_stage[stage]))
        return value
