"""V-Half and V-Min: zero bubble on a V with a half and a third of the activations of 1F1B (arXiv:2405.15362).

- Rank r has stages r and 2 ranks - 1 - r; the last stage is on rank 0. A column of the tables and pictures is one unit of time
  for any F, I or W of one stage; `.` is a rank that waits. A rank never has more activations alive than `V_HALF` or `V_MIN`
  allows; an activation lives from its F to the end of its W.
- A *building block* gives the times at which each rank runs the four passes of one microbatch: F down, F up, I down, I up.
  Blocks repeated every six columns interlock, since a rank has six actions for each microbatch; the Ws fill the remaining
  columns. The lifetime of a microbatch in the block bounds the memory. At both ends of the table, where neighbouring blocks are
  missing, a rank may run ahead of the blocks' order; several margins of free memory are tried, and the shortest table wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import stages_per_rank, two_per_rank
from graphpp.schedules.table.schedule import Row, Schedule

_PERIOD = 6
_PASSES = ((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0))
_DOWN, _UP, _BACK = range(3)  # passes 0 and 2 come from the rank above, 1 and 3 from the rank below
_LAST = 3
_ROOMS = range(5)

Offsets = tuple[int, int, int, int]


@dataclass(frozen=True)
class Block:
    """The times at which rank r of `ranks` runs the four passes of a microbatch, and the most activations alive on a rank."""

    name: str
    at: Callable[[int, int], Offsets]
    limit: Callable[[int], int]


def _half(rank: int, ranks: int) -> Offsets:
    shift = 3 if ranks % 2 == 0 else 0  # no two passes of a rank may share a column of the period
    up, down = 3 * ranks - rank - 2, 3 * ranks + shift + 2 * rank - 1
    return 2 * rank, up, down, 6 * ranks + shift - rank - 2


def _third(rank: int, ranks: int) -> Offsets:
    shift = 2 if ranks % 3 == 0 else 0
    up, down = 2 * ranks - rank - 1, 2 * ranks + shift + rank
    return rank, up, down, 4 * ranks + shift - rank - 1


V_HALF = Block("V-Half", _half, lambda ranks: 2 * ((ranks + 2) // 2))
V_MIN = Block("V-Min", _third, lambda ranks: 2 * ((ranks + 4) // 3))


@stages_per_rank(2)
def v_half(ranks: int, stages: int, microbatches: int) -> Schedule:
    """V-Half: (ranks + 2) // 2 microbatches alive at most, where 1F1B has `ranks`; any number of microbatches.

    r0 0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0F3 0W0 5F2 5I2 5W2 0I1 0W1 .   5F3 5I3 0I2 5W3 0W2 .   0I3 0W3
    r1 .   1F0 .   .   4F0 1F1 .   4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1F3 1I1 4I2 1W1 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3
    r2 .   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3
    """
    return _squeezed(V_HALF, ranks, stages, microbatches)


@stages_per_rank(2)
def v_min(ranks: int, stages: int, microbatches: int) -> Schedule:
    """V-Min: (ranks + 4) // 3 microbatches alive at most, where 1F1B has `ranks`; any number of microbatches.

    r0 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 0I0 5I1 0W0 5W1 5F2 0F3 0I1 5I2 0W1 5W2 5F3 5I3 0I2 5W3 0W2 .   0I3 0W3
    r1 .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 1I0 1W0 .   4I1 4F2 4W1 1I1 1F3 1W1 4I2 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3
    r2 .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 2F3 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3

    Slower than V-Half, and more sensitive to passes that take unequal time.
    """
    return _squeezed(V_MIN, ranks, stages, microbatches)


def _squeezed(block: Block, ranks: int, stages: int, microbatches: int) -> Schedule:
    two_per_rank(block.name, ranks, stages, microbatches)
    best = _Squeeze(block, ranks, microbatches, room=None).rows()
    assert best is not None, "in the blocks' own order every pass finds room"
    for room in _ROOMS:
        best = _Squeeze(block, ranks, microbatches, room, shorter_than=max(map(len, best))).rows() or best
    return Schedule(best, stages, microbatches, block.name)


@dataclass
class _RankProgress:
    """The progress of one rank: the next microbatch of each pass, the activations alive, the Ws that may run, its waits."""

    offsets: Offsets
    next: list[int] = field(default_factory=lambda: [0] * len(_PASSES))
    alive: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    row: list[Action | None] = field(default_factory=list)
    waited: int = 0


@dataclass
class _Squeeze:
    """Run all ranks column by column, in the order of the blocks, with Ws wherever no pass can run.

    `room` None: in the blocks' order throughout. A number: before its first and after its last whole block a rank may run ahead
    of that order, if a forward down that does so leaves room for `room` more activations.
    """

    block: Block
    ranks: int
    microbatches: int
    room: int | None
    shorter_than: int | None = None
    made: set[tuple[int, int, int]] = field(default_factory=set)

    def rows(self) -> tuple[Row, ...] | None:
        """The table; None if it would not be shorter than `shorter_than` columns."""
        ranks = [_RankProgress(self.block.at(rank, self.ranks)) for rank in range(self.ranks)]
        actions = _PERIOD * self.microbatches  # of each rank
        column = 0
        while any(column - rank.waited < actions for rank in ranks):
            chosen = [self._choose(number, rank) for number, rank in enumerate(ranks)]
            ran = [self._run(number, rank, step) for number, (rank, step) in enumerate(zip(ranks, chosen, strict=True))]
            self.made.update(done for done in ran if done)
            column += 1
            if self.shorter_than is not None and any(self._too_long(rank, column, actions) for rank in ranks):
                return None
        for rank in ranks:
            while rank.row[-1] is None:
                rank.row.pop()
        return tuple(tuple(rank.row) for rank in ranks)

    def _too_long(self, rank: _RankProgress, column: int, actions: int) -> bool:
        """Whether a rank's row, with its waits so far, is no shorter than `shorter_than`."""
        assert self.shorter_than is not None
        return column - rank.waited < actions and rank.waited + actions >= self.shorter_than

    def _choose(self, number: int, rank: _RankProgress) -> int | None:
        """The pass to run now: the first in the blocks' order that can run; None if none can."""
        turns = enumerate(zip(rank.offsets, rank.next, strict=True))
        due = sorted([(offset + _PERIOD * m, step) for step, (offset, m) in turns if m < self.microbatches])
        strict = self.room is None or (rank.next[_LAST] > 0 and rank.next[_UP] < self.microbatches)
        room = 0
        for _, step in due[:1] if strict else due:
            needed = 1 + (room if step == _DOWN else 0)
            fits = step >= _BACK or rank.alive + needed <= self.block.limit(self.ranks)
            if fits and self._ready(number, rank, step):
                return step
            room = self.room or 0
        return None

    def _ready(self, number: int, rank: _RankProgress, step: int) -> bool:
        microbatch = rank.next[step]
        before = number - 1 if step % 2 == 0 else number + 1
        turns = not 0 <= before < self.ranks  # the V turns on this rank
        own = step == 0 or (number, step - 1, microbatch) in self.made
        return own and (turns or (before, step, microbatch) in self.made)

    def _run(self, number: int, rank: _RankProgress, step: int | None) -> tuple[int, int, int] | None:
        """Append the next cell of a rank's row; returns (rank, pass, microbatch) of a pass that others may wait for."""
        if step is None and rank.pending:
            chunk, microbatch = rank.pending.popleft()
            rank.alive -= 1
            rank.row.append(Action(self._stage(number, chunk), Kind.W, microbatch))
            return None
        if step is None:
            rank.row.append(None)
            rank.waited += 1
            return None
        microbatch = rank.next[step]
        rank.next[step] += 1
        kind, chunk = _PASSES[step]
        rank.row.append(Action(self._stage(number, chunk), kind, microbatch))
        if kind is Kind.F:
            rank.alive += 1
        else:
            rank.pending.append((chunk, microbatch))
        return number, step, microbatch

    def _stage(self, number: int, chunk: int) -> int:
        return number if chunk == 0 else 2 * self.ranks - 1 - number
