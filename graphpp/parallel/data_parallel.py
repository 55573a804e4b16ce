"""Data parallelism: replicas, ranks that hold the same stages and train on other data, average their gradients.

Contract
--------
- A stage's gradient sums are averaged over the replicas once per step: they are added (`Sums`) and divided by the number of
  replicas. The sums of a bundle are moved into one memory, where they stay. The first messages start at the stage's REDUCE_GRAD
  action if the schedule has one (the checker proves that no backward follows it), and hide under other stages' computation.
  Otherwise they start at the end of the step, as do those of tied parameters, whose partial sums are added first.
- The gradient of an expert is added up over the replicas that have the expert, and divided by the number of all replicas: the
  sum already includes the tokens that the other ranks along `ep` have sent.
- `broadcast_` and `average_` make the parameters or buffers of replicas equal.
- All replicas run the same table over the same stages, so they start the same sums in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace, SpreadExperts
from graphpp.parallel.sums import PendingSums, Sums, merged

_TOGETHER = 2**22  # elements


def check_apart(groups: Iterable[str], place: RankPlace) -> None:
    """Raise `GraphPPError` if a collective of the model reaches a replica, whose parameters may be others (experts).

    `groups`: the names of the process groups of the model's collectives. Replicas that share sequences or have other experts
    are meant to be reached.
    """
    assert place.replicas is not None, "a pipeline without replicas"
    peers = [] if place.cp_ep_group is None else dist.get_process_group_ranks(place.cp_ep_group)
    others = set(dist.get_process_group_ranks(place.replicas)) - {dist.get_rank(), *peers}
    for name in sorted(groups):
        shared = sorted(others.intersection(dist.get_process_group_ranks(group_named(name))))
        if shared:
            raise GraphPPError(
                f"the model exchanges values with rank {shared[0]} over its process group {name!r}, and the dimensions "
                "dp_replicate and dp_shard of mesh= would average all gradients with that rank, also of parameters that are "
                "others there. Ranks with other experts stand along the dimension ep of mesh=, and ranks that share sequences "
                "along cp."
            )


def broadcast_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the first rank's values, in place."""
    first = dist.get_global_rank(group, 0)
    _exchange(tensors, lambda flat: dist.broadcast(flat, first, group=group))


def average_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Average floating-point and complex tensors over the ranks of a group, in place; leave all others."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]

    def mean(flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))

    _exchange(floating, mean)


@torch.no_grad()
def _exchange(tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective over tensors of one dtype together, about `_TOGETHER` elements at a time."""
    groups: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
    seen = Counter[torch.dtype]()
    for tensor in tensors:
        groups[tensor.dtype, seen[tensor.dtype] // _TOGETHER].append(tensor)
        seen[tensor.dtype] += tensor.numel()
    for each in groups.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in each])
        collective(flat)
        for tensor, part in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
            tensor.copy_(part.view_as(tensor))


class Replicas:
    """Averages gradients over the ranks of a group; does nothing for None or a group of one."""

    def __init__(self, group: dist.ProcessGroup | None, sums: Sums, experts: SpreadExperts | None = None) -> None:
        """`group`: all replicas. `sums`: adds over ranks. `experts`: the replicas with the same experts, and others."""
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._sums, self._same_experts = sums, None if experts is None else experts.replicas
        self._in_flight: deque[tuple[torch.Tensor, PendingSums]] = deque()

    @property
    def several(self) -> bool:
        """Whether there are other replicas."""
        return self._group is not None

    def start(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str]) -> None:
        """Start to average some of the sums in the memory into which they move."""
        if self._group is not None:
            self._start(sums, fqns, self._group)

    def start_of_experts(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str]) -> None:
        """Start to average the sums of experts, which include the tokens that the other ranks along `ep` have sent."""
        if self._same_experts is not None:
            self._start(sums, fqns, self._same_experts)
            return
        for fqn in fqns:
            sums[fqn].div_(dist.get_world_size(self._group))

    def _start(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str], group: dist.ProcessGroup) -> None:
        for flat in merged(sums, fqns):
            self._in_flight.append((flat, self._sums.everywhere(flat, group)))

    def finish(self) -> None:
        """Wait until all sums that were started are averaged."""
        while self._in_flight:
            flat, pending = self._in_flight.popleft()  # the parts of this bundle are freed before the next bundle is added up
            (summed,) = pending()
            torch.div(summed, dist.get_world_size(self._group), out=flat)

    def drop(self) -> None:
        """Forget the sums in flight, after a failure."""
        self._in_flight.clear()
