"""TODO contract."""

from __future__ import annotations

import torch.distributed as dist


class Subgroups:
    """Process groups of some ranks of a group, each made once. Every rank of the group asks for them in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None where nobody needs one."""
        if ranks not in self._made:
            self._made[ranks] = self._new(ranks)
        return self._made[ranks]

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if self._group is None or len(ranks) < 2:
            return None
        world = [dist.get_global_rank(self._group, rank) for rank in ranks]
        # Local: ranks of the world that are not in the group do not come here.
        made: dist.ProcessGroup = dist.new_group(world, use_local_synchronization=True)
        return made
