"""Data parallelism: replicas, which have the same stages and train on other data, average their gradients.

Contract:
- A stage's gradient sums are averaged over the replicas once per step: added (`Sums`), then divided by the number of replicas.
  The sums of a bundle move into one memory for good. Messages start at the stage's REDUCE_GRAD action if the schedule has one
  (the checker proves that no backward follows it), and overlap with other stages' computation. Otherwise, and for tied
  parameters, whose partial sums are added first, they start at the end of the step.
- An expert's gradient is added over the replicas with that expert, and divided by the number of all replicas: the sum already
  includes the tokens that the other ranks along `ep` have sent.
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
    """Raise `GraphPPError` if a collective of the model reaches a replica that may have other parameters (experts).

    `groups`: the names of the process groups of the model's collectives. Collectives along `cp`, `ep` and `etp` are allowed.
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
                "others there. Ranks with other experts stand along the dimension ep of mesh= (or of parallel.expert_mesh), "
                "and ranks that share sequences along cp."
            )


def broadcast_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    first = dist.get_global_rank(group, 0)
    _exchange(tensors, lambda flat: dist.broadcast(flat, first, group=group))


def average_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Average floating-point and complex tensors over the ranks of a group, in place; other tensors stay unchanged."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]

    def mean(flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))

    _exchange(floating, mean)


@torch.no_grad()
def _exchange(tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective over concatenated tensors of one dtype, about `_TOGETHER` elements at a time."""
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
    """Averages gradients over the ranks of a group; does nothing without other ranks."""

    def __init__(self, group: dist.ProcessGroup | None, sums: Sums, experts: SpreadExperts | None = None) -> None:
        """`group`: all replicas. `sums`: adds over ranks. `experts`: where experts are spread."""
        self._group, self._number = group, 1 if group is None else dist.get_world_size(group)
        self._sums, self._same_experts = sums, None if experts is None else experts.replicas
        self._in_flight: deque[tuple[torch.Tensor, PendingSums]] = deque()

    @property
    def several(self) -> bool:
        return self._group is not None or self._same_experts is not None

    def start(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str]) -> None:
        """Start to average some of the sums, which move into merged memory."""
        if self._group is not None:
            self._start(sums, fqns, self._group)

    def start_of_experts(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str]) -> None:
        if self._same_experts is not None:
            self._start(sums, fqns, self._same_experts)
            return
        for fqn in fqns:
            sums[fqn].div_(self._number)

    def _start(self, sums: MutableMapping[str, torch.Tensor], fqns: Sequence[str], group: dist.ProcessGroup) -> None:
        for flat in merged(sums, fqns):
            self._in_flight.append((flat, self._sums.everywhere(flat, group)))

    def finish(self) -> None:
        while self._in_flight:
            flat, pending = self._in_flight.popleft()  # frees the parts of this bundle before the next one is added
            (summed,) = pending()
            torch.div(summed, self._number, out=flat)

    def drop(self) -> None:
        self._in_flight.clear()
