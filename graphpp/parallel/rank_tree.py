"""Small collectives over many ranks that need no process group of all of them.

Contract:
- The ranks stand in rows of at most `ROW`, each with a process group of its own. The first ranks of the rows stand in rows of
  the next level, and so on up to a level of one row. A rank has at most `ROW - 1` peers a level; 1 of 16 climbs a level.
- A collective goes up level by level, and down again: at most 2 log(n) messages follow each other. With one row it is one
  collective of the row's group.
- All ranks make a tree together, and call its methods in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from graphpp.parallel.groups import group_among, has_gloo
from graphpp.parallel.transport import transport_of

ROW = 16  # ranks: two machines of 8 GPUs, in one row


@dataclass(frozen=True)
class RankTree:
    """`ranks`: of the world, in order. `rows`: this rank's groups from the lowest level on (None: alone in its row).

    `width`: the number of ranks of a full row.
    """

    ranks: tuple[int, ...]
    rows: tuple[dist.ProcessGroup | None, ...]
    width: int

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> RankTree:
        """The ranks of an own group: one row, or for a group of NCCL alone, which has more than `MOST` ranks, rows of gloo."""
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls.made(ranks, group) if dist.get_backend(group) == "nccl" else cls(ranks, (group,), len(ranks))

    @classmethod
    def made(cls, ranks: Sequence[int], like: dist.ProcessGroup) -> RankTree:
        """A tree of own groups of these world ranks, with this one. `like`: as for `own_group`. Raises as `own_group` does."""
        level, rows, me = tuple(ranks), list[dist.ProcessGroup | None](), dist.get_rank()
        while me in level and (len(level) > 1 or not rows):
            first = level.index(me) // ROW * ROW
            rows.append(group_among(level[first : first + ROW], like))
            level = level[::ROW]
        return cls(tuple(ranks), tuple(rows), ROW)

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        return [row for row in self.rows if row is not None]

    @property
    def on_gloo(self) -> bool:
        return all(map(has_gloo, self.groups))

    @cached_property
    def at(self) -> int:
        """This rank's position."""
        return self.ranks.index(dist.get_rank())

    def largest(self, mine: Sequence[int], device: torch.device) -> list[int]:
        """The maximum over all ranks of each number; `mine`: 64-bit integers, equally many on all ranks."""
        found = list(mine)
        for row in (*self.rows, *self._down()):
            if row is not None:
                found = transport_of(row, device).largest(found)
        return found

    def of_row(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensor `mine` of every rank of the lowest row, [ranks, ..]; shapes are equal."""
        return _gathered(mine[None], self.rows[0])

    def of_all(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensor `mine` of every rank, in order, [ranks, ..]; shapes are equal."""
        found, full = mine[None], 1
        for row in self.rows:  # the last rank of a row may have fewer ranks below
            padding = found.new_zeros(full - len(found), *mine.shape)
            found, full = _gathered(torch.cat([found, padding]), row), full * self.width
            found = found[: len(self.ranks) - self.at // full * full]
        if len(found) < len(self.ranks):
            found = mine.new_zeros(len(self.ranks), *mine.shape)
        for row in self._down():
            _send(found, row, 0)
        return found

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Copy the values of the rank at the position `source` to all ranks; shapes and dtypes are equal."""
        below = 1
        for row in self.rows:
            if source // below // self.width == self.at // below // self.width:
                _send(values, row, source // below % self.width)
            below *= self.width
        for row in self._down():
            _send(values, row, 0)

    def _down(self) -> Iterator[dist.ProcessGroup | None]:
        """The rows from the top on whose other ranks lack what the first one has: all but the one at the top."""
        levels, full = 1, self.width
        while full < len(self.ranks):
            levels, full = levels + 1, full * self.width
        return reversed(self.rows[: levels - 1])


Ranks = RankTree | dist.ProcessGroup | None  # None: one process


def _gathered(block: torch.Tensor, row: dist.ProcessGroup | None) -> torch.Tensor:
    """The blocks of all ranks of a row, one after the other."""
    if row is None:
        return block
    blocks = [torch.empty_like(block) for _ in range(dist.get_world_size(row))]
    dist.all_gather(blocks, block, group=row)
    return torch.cat(blocks)


def _send(values: torch.Tensor, row: dist.ProcessGroup | None, source: int) -> None:
    if row is not None:
        dist.broadcast(values, group=row, group_src=source)
