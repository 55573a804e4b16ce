"""Gradient accumulation that is bit-equal to a plain loop over microbatches.

Contract
--------
- `param.grad` after the step is ((grad + g0) + g1) + .. in microbatch order, whatever order the schedule ran the
  backwards in: a gradient that comes early waits for its turn.
- The first gradient becomes `param.grad` itself when it is contiguous and nobody else holds its memory, as autograd does;
  else a contiguous copy.
- A parameter that several stages use collects one partial sum per stage; `TiedReduction` adds them in stage order, once, at the
  end of the step, to the same bits on every rank that holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist


class Accumulator:
    """Collects the gradients of one stage's parameters over the microbatches of a step."""

    def __init__(self, fqns: Sequence[str], shared: Sequence[bool]) -> None:
        self.fqns = tuple(fqns)
        self._shared = tuple(shared)
        self._sums: list[torch.Tensor | None] = []
        self._next: list[int] = []
        self._early: list[dict[int, torch.Tensor]] = []
        self.start({})

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Begin a step; `initial` holds what is there already, per FQN."""
        self._sums = [initial.get(fqn) for fqn in self.fqns]
        self._next = [0] * len(self.fqns)
        self._early = [{} for _ in self.fqns]

    @property
    def sums(self) -> dict[str, torch.Tensor]:
        """The sums so far, per FQN."""
        return {fqn: total for fqn, total in zip(self.fqns, self._sums, strict=True) if total is not None}

    def take(self, microbatch: int, place: int, gradient: torch.Tensor) -> None:
        """Take one microbatch's gradient of parameter `fqns[place]`; gradients count in microbatch order."""
        early, turn = self._early[place], self._next[place]
        if microbatch != turn:
            early[microbatch] = gradient
            return
        self._add(place, gradient)
        while (turn := turn + 1) in early:
            self._add(place, early.pop(turn))
        self._next[place] = turn

    def _add(self, place: int, gradient: torch.Tensor) -> None:
        total = self._sums[place]
        if total is not None:
            total.add_(gradient)
        else:
            copied = self._shared[place] or _is_part(gradient)
            self._sums[place] = gradient.clone(memory_format=torch.contiguous_format) if copied else gradient


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
    # Local: ranks of the world that are not in `group` do not come here.
    made: dist.ProcessGroup = dist.new_group(world, use_local_synchronization=True)
    return made
