"""Gradient accumulation that is bit-equal to a plain loop over microbatches.

Contract
--------
- `param.grad` after the step is ((grad + g0) + g1) + .. in microbatch order, whatever order the schedule ran the
  backwards in: a gradient that comes early waits for its turn.
- The first gradient becomes `param.grad` itself when nobody else holds its memory, as autograd does; else a copy.
- A parameter that several stages use collects one partial sum per stage; `reduce_tied` adds them in stage order, once, at the
  end of the step, to the same bits on every rank that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

Gradients = Sequence[torch.Tensor]


class Accumulator:
    """Collects the gradients of one stage's parameters over the microbatches of a step."""

    def __init__(self, fqns: Sequence[str], shared: Sequence[bool]) -> None:
        self.fqns = tuple(fqns)
        self._shared = tuple(shared)
        self._next = 0
        self._early: dict[int, Gradients] = {}
        self.sums: dict[str, torch.Tensor] = {}

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Begin a step; `initial` holds what is there already, per FQN."""
        self.sums = dict(initial)
        self._early.clear()
        self._next = 0

    def add(self, microbatch: int, gradients: Gradients) -> None:
        """Take one microbatch's gradients (in the order of `fqns`); they count in microbatch order."""
        self._early[microbatch] = gradients
        while self._next in self._early:
            self._accumulate(self._early.pop(self._next))
            self._next += 1

    def _accumulate(self, gradients: Gradients) -> None:
        for fqn, gradient, shared in zip(self.fqns, gradients, self._shared, strict=True):
            total = self.sums.get(fqn)
            if total is None:
                self.sums[fqn] = gradient.clone() if shared or _is_part(gradient) else gradient
            else:
                total.add_(gradient)


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a larger or differently ordered memory."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() or not tensor.is_contiguous()


class TiedReduction:
    """Adds the partial sums of the parameters that several stages use, among the ranks that hold them."""

    def __init__(
        self, holders: Mapping[str, Sequence[int]], rank_of_stage: Mapping[int, int], group: dist.ProcessGroup | None
    ):
        self.holders = {fqn: tuple(stages) for fqn, stages in holders.items()}
        self._ranks = {fqn: tuple(sorted({rank_of_stage[s] for s in stages})) for fqn, stages in self.holders.items()}
        self._rank_of_stage = rank_of_stage
        self._groups = {ranks: _subgroup(ranks, group) for ranks in sorted(set(self._ranks.values()))}
        self._rank = dist.get_rank(group) if group is not None else 0

    def reduce(self, partial: Callable[[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The full sums of this rank's tied parameters; `partial(stage, fqn)` gives a local stage's partial sum."""
        return {fqn: self._total(fqn, partial) for fqn, ranks in self._ranks.items() if self._rank in ranks}

    def _total(self, fqn: str, partial: Callable[[int, str], torch.Tensor]) -> torch.Tensor:
        stages, ranks = self.holders[fqn], self._ranks[fqn]
        local = {stage: partial(stage, fqn) for stage in stages if self._rank_of_stage[stage] == self._rank}
        everyone = dict(local)
        for stage in stages if len(ranks) > 1 else ():
            everyone[stage] = self._broadcast(ranks, stage, local.get(stage), next(iter(local.values())))
        total = everyone[stages[0]].clone()
        for stage in stages[1:]:
            total.add_(everyone[stage])
        return total

    def _broadcast(
        self, ranks: tuple[int, ...], stage: int, value: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        buffer = value if value is not None else torch.empty_like(like)
        dist.broadcast(buffer, group=self._groups[ranks], group_src=ranks.index(self._rank_of_stage[stage]))
        return buffer


def _subgroup(ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A process group of some ranks of `group`; every rank of `group` calls this, in the same order."""
    if group is None or len(ranks) < 2:
        return None
    world = [dist.get_global_rank(group, rank) for rank in ranks]
    made: dist.ProcessGroup = dist.new_group(world)
    return made
