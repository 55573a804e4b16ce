"""The schedules with whole backwards: GPipe, 1F1B, interleaved 1F1B, breadth first, the plain loop.

Every function returns a compute-only `Schedule` that `check` accepts, or raises `ScheduleError` naming numbers that would fit.
In the pictures time runs to the right, one unit for any F or B, and `.` is a rank that waits. Stages are placed in a loop: rank
r has r, r + ranks, r + 2 ranks, ...
"""

from __future__ import annotations

from itertools import zip_longest

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import all_on_one_rank, check_counts, per_rank, round_length, stages_per_rank
from graphpp.schedules.table.schedule import Row, Schedule

SEVERAL = "Interleaved1F1B and LoopedBFS take several stages"
"""The schedules that an error recommends for more than one stage per rank."""


def gpipe(ranks: int, stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (Huang et al. 2019, arXiv:1811.06965).

    r0 0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2
    r1 .   1F0 1F1 1F2 .   .   1B0 1B1 1B2
    r2 .   .   2F0 2F1 2F2 2B0 2B1 2B2

    One stage per rank; on a single rank any number of stages, column after column. The order of torch's `ScheduleGPipe`.
    """
    if all_on_one_rank("GPipe", ranks, stages, microbatches, SEVERAL):
        return one_after_another(gpipe(stages, stages, microbatches))

    def row(rank: int) -> Row:
        forwards, backwards = (one_per_microbatch(kind, rank, microbatches) for kind in (Kind.F, Kind.B))
        return (None,) * rank + forwards + (None,) * 2 * (ranks - 1 - rank) + backwards

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "GPipe")


def one_f_one_b(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Forwards until the pipeline is full, then a backward after every forward (PipeDream-Flush, arXiv:2006.09503).

    r0 0F0 0F1 .   .   0F2 0B0 0F3 0B1 .   0B2 .   0B3
    r1 .   1F0 .   1F1 1B0 1F2 1B1 1F3 1B2 .   1B3
    r2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Rank r warms up with w = min(microbatches, ranks-1-r) forwards, so at most w + 1 microbatches are alive on it.
    The last rank runs F, B, F, B, ... from column ranks-1 on, and rank r runs
        B of microbatch m in column 2 ranks - 1 - r + 2m
        F of microbatch m in column r + 2m, but the first w without pause from column r on

    One stage per rank; on a single rank any number of stages, column after column. torch is off by one on the last rank.
    """
    if all_on_one_rank("1F1B", ranks, stages, microbatches, SEVERAL):
        return one_after_another(one_f_one_b(stages, stages, microbatches))

    def row(rank: int) -> Row:
        warm_up = ranks - 1 - rank
        at: dict[int, Action] = {}
        for m in range(microbatches):
            at[rank + (m if m < warm_up else 2 * m)] = Action(rank, Kind.F, m)
            at[ranks + warm_up + 2 * m] = Action(rank, Kind.B, m)
        return tuple(at.get(column) for column in range(1 + max(at)))

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "1F1B")


@stages_per_rank(2)
def interleaved_1f1b(ranks: int, stages: int, microbatches: int) -> Schedule:
    """1F1B with several stages per rank, k microbatches through one stage before the next (arXiv:2104.04473).

    r0 0F0 0F1 2F0 2F1 .   .   0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 .   0B2 .   0B3
    r1 .   1F0 1F1 .   3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 .   1B2 .   1B3
       ----- warm-up ----- ---------- one F, one B ---------- -------- cool-down --------

    The microbatches are divided into rounds of k, and k is `ranks` or a little more, so `microbatches` must be a
    multiple of max(1, microbatches // ranks). Equal to torch's `ScheduleInterleaved1F1B`, idle cells included.
    """
    chunks = per_rank("Interleaved1F1B", ranks, stages, microbatches)
    k = round_length("Interleaved1F1B", ranks, microbatches)
    total, forward, backward = chunks * microbatches, Kind.F, Kind.B
    order = [(step // k % chunks * ranks, step // (k * chunks) * k + step % k) for step in range(total)]

    def row(rank: int) -> Row:
        hops = ranks - 1 - rank
        forwards = [Action(first + rank, forward, m) for first, m in order]
        backwards = [Action(stages - ranks - first + rank, backward, m) for first, m in order]
        warm_up = min(total, (chunks - 1) * k + 2 * hops)
        idle = stages + 2 * hops - warm_up - rank if warm_up else 0
        pairs = zip_longest(forwards[warm_up:], backwards)
        return (None,) * rank + (*forwards[:warm_up], *(None,) * idle, *(cell for pair in pairs for cell in pair))

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "Interleaved1F1B")


@stages_per_rank(2)
def looped_bfs(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Breadth first: all microbatches through one stage, then the next; the backwards last stage first (arXiv:2211.05953).

    r0 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
    r1 .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Torch runs the backwards of a stage in descending order of the microbatches: as fast, but gradients that add up in
    ascending order would all wait for the first microbatch's.
    """
    per_rank("LoopedBFS", ranks, stages, microbatches)

    def row(rank: int) -> Row:
        mine = range(rank, stages, ranks)
        forwards = tuple(cell for stage in mine for cell in one_per_microbatch(Kind.F, stage, microbatches))
        backwards = tuple(cell for stage in reversed(mine) for cell in one_per_microbatch(Kind.B, stage, microbatches))
        return (None,) * rank + forwards + (None,) * (2 * (ranks - 1 - rank)) + backwards

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "LoopedBFS")


def plain_loop(ranks: int, stages: int, microbatches: int) -> Schedule:
    """One rank, one microbatch after another: the usual gradient-accumulation loop without a pipeline.

    r0 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1

    Raises `ScheduleError` for more than one rank.
    """
    check_counts(ranks, stages, microbatches)
    if ranks != 1:
        raise ScheduleError(f"the plain loop runs on one rank, not on {ranks}; take 1F1B or Interleaved1F1B")
    row: list[Action] = []
    for m in range(microbatches):
        row += [Action(stage, Kind.F, m) for stage in range(stages)]
        row += [Action(stage, Kind.B, m) for stage in reversed(range(stages))]
    return Schedule((tuple(row),), stages, microbatches, "loop")


def one_per_microbatch(kind: Kind, stage: int, microbatches: int) -> Row:
    return tuple(Action(stage, kind, m) for m in range(microbatches))


def one_after_another(schedule: Schedule) -> Schedule:
    """All stages on one rank, column by column: each stage keeps its order, and no value is read before it is computed."""
    row = tuple(cell for column in zip_longest(*schedule.table) for cell in column if cell is not None)
    return Schedule((row,), schedule.stages, schedule.microbatches, schedule.name)
