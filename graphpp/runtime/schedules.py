"""The schedules known by name: functions from (ranks, stages, microbatches) to a table.

Contract
    Every function returns a compute-only `Schedule` that `graphpp.runtime.checker.check` accepts, or raises
    `ScheduleError` saying what would fit. In the pictures time runs to the right, one unit for any F or B, and
    `.` is a rank that waits. A new schedule is one more function and one more line in `SCHEDULES`.

    Stages are dealt out in a loop: rank r holds r, r + ranks, r + 2 ranks, ... (`stage_ids`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Literal

from graphpp.errors import ScheduleError
from graphpp.runtime.actions import Action, Kind
from graphpp.runtime.schedule import Row, Schedule

Generator = Callable[[int, int, int], Schedule]


def gpipe(ranks: int, stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (Huang et al. 2019, arXiv:1811.06965).

    r0 0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2
    r1 .   1F0 1F1 1F2 .   .   1B0 1B1 1B2
    r2 .   .   2F0 2F1 2F2 2B0 2B1 2B2

    One stage per rank; on a single rank any number of stages, the picture's columns one after another. The order is
    that of torch's `ScheduleGPipe`.
    """
    if _all_on_one_rank("GPipe", ranks, stages, microbatches):
        return _one_after_another(gpipe(stages, stages, microbatches))

    def row(rank: int) -> Row:
        idle = 2 * (ranks - 1 - rank)
        return (None,) * rank + _every(Kind.F, rank, microbatches) + (None,) * idle + _every(Kind.B, rank, microbatches)

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "GPipe")


def one_f_one_b(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Forwards until the pipeline is full, then a backward after every forward (PipeDream-Flush, arXiv:2006.09503).

    r0 0F0 0F1 .   .   0F2 0B0 0F3 0B1 .   0B2 .   0B3
    r1 .   1F0 .   1F1 1B0 1F2 1B1 1F3 1B2 .   1B3
    r2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Rank r warms up with w = min(microbatches, ranks-1-r) forwards, so at most w + 1 microbatches are alive on it. The
    last rank sets the beat: F, B, F, B, ... from column ranks-1 on. Seen from there, rank r runs
        B of microbatch m in column 2 ranks - 1 - r + 2m
        F of microbatch m in column r + 2m, but the first w without pause from column r on

    One stage per rank; on a single rank any number of stages, the columns one after another. torch's
    `Schedule1F1B._get_pipeline_order` has the same order except on the last rank, where it is off by one.
    """
    if _all_on_one_rank("1F1B", ranks, stages, microbatches):
        return _one_after_another(one_f_one_b(stages, stages, microbatches))

    def row(rank: int) -> Row:
        warm_up = ranks - 1 - rank
        at: dict[int, Action] = {}
        for m in range(microbatches):
            at[rank + (m if m < warm_up else 2 * m)] = Action(rank, Kind.F, m)
            at[ranks + warm_up + 2 * m] = Action(rank, Kind.B, m)
        return tuple(at.get(column) for column in range(1 + max(at)))

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "1F1B")


def interleaved_1f1b(ranks: int, stages: int, microbatches: int) -> Schedule:
    """1F1B with several stages per rank, k microbatches through one stage before the next (arXiv:2104.04473).

    r0 0F0 0F1 2F0 2F1 .   .   0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 .   0B2 .   0B3
    r1 .   1F0 1F1 .   3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 .   1B2 .   1B3
       ----- warm-up ----- ---------- one F, one B ---------- -------- cool-down --------

    The microbatches are dealt into rounds of k, and k is `ranks` or a little more, so `microbatches` must be a
    multiple of max(1, microbatches // ranks). Equal to torch's `ScheduleInterleaved1F1B`, idle cells included.
    """
    chunks = _per_rank("Interleaved1F1B", ranks, stages, microbatches)
    k = _round_length(ranks, microbatches)
    total = chunks * microbatches

    def action(kind: Kind, rank: int, step: int) -> Action:
        chunk = step // k % chunks
        if kind is Kind.B:
            chunk = chunks - 1 - chunk
        return Action(chunk * ranks + rank, kind, step // (k * chunks) * k + step % k)

    def row(rank: int) -> Row:
        hops = ranks - 1 - rank
        forwards = [action(Kind.F, rank, step) for step in range(total)]
        backwards = [action(Kind.B, rank, step) for step in range(total)]
        warm_up = min(total, (chunks - 1) * k + 2 * hops)
        idle = stages + 2 * hops - warm_up - rank if warm_up else 0
        pairs = zip_longest(forwards[warm_up:], backwards)
        return (None,) * rank + (*forwards[:warm_up], *(None,) * idle, *(cell for pair in pairs for cell in pair))

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "Interleaved1F1B")


def looped_bfs(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Breadth first: all microbatches through one stage, then the next; backwards mirrored (arXiv:2211.05953).

    r0 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
    r1 .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

    Any number of microbatches. The backwards run in DESCENDING microbatch order. Equal to torch's
    `ScheduleLoopedBFS`, idle cells included.
    """
    _per_rank("LoopedBFS", ranks, stages, microbatches)

    def row(rank: int) -> Row:
        mine = range(rank, stages, ranks)
        forwards = tuple(cell for stage in mine for cell in _every(Kind.F, stage, microbatches))
        backwards = tuple(cell for stage in mine for cell in _every(Kind.B, stage, microbatches))
        return (None,) * rank + forwards + (None,) * (2 * (ranks - 1 - rank)) + backwards[::-1]

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "LoopedBFS")


def plain_loop(ranks: int, stages: int, microbatches: int) -> Schedule:
    """One rank, one microbatch after another: the gradient-accumulation loop everybody writes without a pipeline.

    r0 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    _positive(ranks, stages, microbatches)
    if ranks != 1:
        raise ScheduleError(f"the plain loop runs on one rank, not on {ranks}; take 1F1B or Interleaved1F1B")
    row: list[Action] = []
    for m in range(microbatches):
        row += [Action(stage, Kind.F, m) for stage in range(stages)]
        row += [Action(stage, Kind.B, m) for stage in reversed(range(stages))]
    return Schedule((tuple(row),), stages, microbatches, "loop")


def auto(ranks: int, stages: int, microbatches: int) -> Schedule:
    """The plain loop on one rank, 1F1B for one stage per rank, Interleaved1F1B for several."""
    if ranks == 1:
        return plain_loop(ranks, stages, microbatches)
    return (one_f_one_b if stages == ranks else interleaved_1f1b)(ranks, stages, microbatches)


SCHEDULES: dict[str, Generator] = {
    "auto": auto,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Interleaved1F1B": interleaved_1f1b,
    "LoopedBFS": looped_bfs,
}
SEVERAL_PER_RANK = frozenset({interleaved_1f1b, looped_bfs})
"""Those made for more than one stage per rank."""


def stage_ids(rank: int, ranks: int, stages: int, style: Literal["loop", "v"] = "loop") -> tuple[int, ...]:
    """The stages that `rank` holds, ascending. Same as torchtitan's `stage_ids_this_rank`.

    `loop`: rank, rank + ranks, ...; `v`: exactly two, rank and stages-1-rank, so the last stage is on rank 0.
    Raises `ScheduleError` (a `ValueError`) if rank, stage count or style do not fit.
    """
    _positive(ranks, stages)
    if not 0 <= rank < ranks:
        raise ScheduleError(f"rank {rank} does not exist among {ranks}; take 0..{ranks - 1}")
    if style not in ("loop", "v"):
        raise ScheduleError(f"unknown style {style!r}; take 'loop' or 'v'")
    if stages % ranks:
        raise ScheduleError(f"{stages} stages cannot be dealt evenly to {ranks} ranks; {_multiples(ranks, stages)}")
    if style == "loop":
        return tuple(range(rank, stages, ranks))
    if stages != 2 * ranks:
        raise ScheduleError(f"style 'v' puts two stages on each rank: {ranks} ranks need {2 * ranks}, not {stages}")
    return rank, stages - 1 - rank


def _every(kind: Kind, stage: int, microbatches: int) -> Row:
    return tuple(Action(stage, kind, m) for m in range(microbatches))


def _one_after_another(schedule: Schedule) -> Schedule:
    """All stages on one rank: column after column keeps every stage's own order and all data flow."""
    row = tuple(cell for column in zip_longest(*schedule.table) for cell in column if cell is not None)
    return Schedule((row,), schedule.stages, schedule.microbatches, schedule.name)


def _all_on_one_rank(name: str, ranks: int, stages: int, microbatches: int) -> bool:
    _positive(ranks, stages, microbatches)
    if ranks > 1 and stages != ranks:
        many = "; Interleaved1F1B and LoopedBFS take several stages per rank" if stages % ranks == 0 else ""
        raise ScheduleError(
            f"{name} runs one stage per rank: {stages} stages do not fit {ranks} ranks, {ranks} stages would{many}"
        )
    return ranks == 1 and stages > 1


def _per_rank(name: str, ranks: int, stages: int, microbatches: int) -> int:
    _positive(ranks, stages, microbatches)
    if stages % ranks:
        fit = _multiples(ranks, stages)
        raise ScheduleError(f"{name} gives every rank equally many stages: {stages} do not fit {ranks} ranks; {fit}")
    return stages // ranks


def _round_length(ranks: int, microbatches: int) -> int:
    def fits(count: int) -> bool:
        return count % max(1, count // ranks) == 0

    if not fits(microbatches):
        below = next(count for count in range(microbatches, 0, -1) if fits(count))
        above = next(count for count in range(microbatches, microbatches + ranks) if fits(count))
        raise ScheduleError(
            f"Interleaved1F1B on {ranks} ranks does not admit {microbatches} microbatches: it runs them in "
            f"{microbatches // ranks} equal rounds; the nearest that fit are {below} and {above}, and so does every "
            f"number below {2 * ranks} and every multiple of {ranks}"
        )
    return microbatches // max(1, microbatches // ranks)


def _multiples(ranks: int, stages: int) -> str:
    below, above = stages // ranks * ranks, (stages // ranks + 1) * ranks
    return f"take {above}" if below == 0 else f"take {below} or {above}, or another multiple of {ranks}"


def _positive(*counts: int) -> None:
    for noun, count in zip(("ranks", "stages", "microbatches"), counts, strict=False):
        if count < 1:
            raise ScheduleError(f"a schedule needs at least one of each: got {count} {noun}")
