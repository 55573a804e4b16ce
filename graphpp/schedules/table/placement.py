"""The placement of stages on ranks, and the numbers of ranks, stages and microbatches that a schedule takes.

Placement "loop": rank r has r, r + ranks, ...; "v": rank r has r and stages-1-r, so the last stage is on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from graphpp.arguments import COUNT, INDEX, TEXT, checked, require
from graphpp.errors import ScheduleError

_STAGES_PER_RANK = "_stages_per_rank"
_MOST_RANKS, _MOST_FORWARDS = 2**12, 2**20
G = TypeVar("G", bound=Callable[..., object])


def stages_per_rank(count: int, *, alone: int | None = None) -> Callable[[G], G]:
    """Decorate a generator that is made for `count` stages per rank; `alone`: its number on a single rank, if another."""

    def declare(generator: G) -> G:
        setattr(generator, _STAGES_PER_RANK, (count, count if alone is None else alone))
        return generator

    return declare


def usual_stages(generator: object, ranks: int) -> int:
    """The number of stages for a generator if the user gives none: one per rank, unless it declares another."""
    count, alone = getattr(generator, _STAGES_PER_RANK, (1, 1))
    return int(ranks * (count if ranks > 1 else alone))


@checked(ScheduleError, rank=INDEX, ranks=COUNT, stages=COUNT, style=TEXT)
def stage_ids(rank: int, ranks: int, stages: int, style: Literal["loop", "v"] = "loop") -> tuple[int, ...]:
    """The stages of `rank`, ascending, as torchtitan's `stage_ids_this_rank`. Raises `ScheduleError` if the arguments do not
    fit.

    `loop`: rank, rank + ranks, ...; `v`: exactly two, rank and stages-1-rank, so the last stage is on rank 0.
    """
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


def check_counts(ranks: int, stages: int, microbatches: int) -> None:
    """Raise `ScheduleError` for a count that is no positive integer, and for counts whose table takes minutes to make."""
    for name, count in (("ranks", ranks), ("stages", stages), ("microbatches", microbatches)):
        require(ScheduleError, name, COUNT, count)
    if ranks > _MOST_RANKS or stages * microbatches > _MOST_FORWARDS:
        raise ScheduleError(
            f"a table of {ranks:,} ranks, {stages:,} stages and {microbatches:,} microbatches is too large to work with: "
            f"take at most {_MOST_RANKS:,} ranks and {_MOST_FORWARDS:,} forwards (stages times microbatches)"
        )


def all_on_one_rank(name: str, ranks: int, stages: int, microbatches: int, several: str) -> bool:
    """Whether several stages are all on one rank. Raises for other stage counts than one per rank.

    `several`: the schedules that the error recommends for more than one stage per rank.
    """
    check_counts(ranks, stages, microbatches)
    if ranks > 1 and stages != ranks:
        many = f"; {several} per rank" if stages % ranks == 0 else ""
        raise ScheduleError(
            f"{name} runs one stage per rank: {stages} stages do not fit {ranks} ranks, {ranks} stages would{many}"
        )
    return ranks == 1 and stages > 1


def per_rank(name: str, ranks: int, stages: int, microbatches: int) -> int:
    """The number of stages on each rank; raises `ScheduleError` if the stages cannot be divided evenly."""
    check_counts(ranks, stages, microbatches)
    if stages % ranks:
        fit = _multiples(ranks, stages)
        raise ScheduleError(f"{name} gives every rank equally many stages: {stages} do not fit {ranks} ranks; {fit}")
    return stages // ranks


def two_per_rank(name: str, ranks: int, stages: int, microbatches: int) -> None:
    """Raise `ScheduleError` unless there are two stages for each rank, placed in a V."""
    check_counts(ranks, stages, microbatches)
    if stages != 2 * ranks:
        placed = f"two stages per rank, rank r having stages r and {2 * ranks - 1} - r"
        raise ScheduleError(f"{name} runs {placed}: {stages} stages do not fit {ranks} ranks, {2 * ranks} stages would")


def round_length(name: str, ranks: int, microbatches: int) -> int:
    """The microbatches in a round of an interleaved schedule: `ranks` or a few more. Raises if no equal rounds are possible."""

    def fits(count: int) -> bool:
        return count % max(1, count // ranks) == 0

    if not fits(microbatches):
        below = next(count for count in range(microbatches, 0, -1) if fits(count))
        above = next(count for count in range(microbatches, microbatches + ranks) if fits(count))
        raise ScheduleError(
            f"{name} on {ranks} ranks does not admit {microbatches} microbatches: it runs them in "
            f"{microbatches // ranks} equal rounds; the nearest that fit are {below} and {above}, and so does every "
            f"number below {2 * ranks} and every multiple of {ranks}; MegatronInterleaved takes any number"
        )
    return microbatches // max(1, microbatches // ranks)


def _multiples(ranks: int, stages: int) -> str:
    below, above = stages // ranks * ranks, (stages // ranks + 1) * ranks
    return f"take {above}" if below == 0 else f"take {below} or {above}, or another multiple of {ranks}"
