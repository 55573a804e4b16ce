"""Start orders: stable patterns, in which every microbatch takes the same path, one period after the previous microbatch.

A pattern gives a time to each forward and backward, and a rank's order is the order of these times. The times of microbatch m
are those of microbatch 0 plus m periods. Within a microbatch each step follows the previous one after a delay that is equal for
all steps of a leg; a leg is one pass through all ranks. The delays decide how long activations live and where each rank has
gaps (Qi et al., arXiv:2405.15362). 1F1B, ZB-H1, ZBV, V-Half and V-Min are among the patterns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product, zip_longest
from random import Random

from graphpp.schedules.search.candidate import Candidate
from graphpp.schedules.search.problem import Problem

_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Delays of a step, in operations of mean length; halves let a pattern of two ranks alternate."""

_EFFORT, _FEWEST = 120_000, 8
"""Patterns times forwards, which bounds the number of patterns; and the least number of patterns."""


def start_patterns(problem: Problem, whole: bytearray, random: Random) -> Iterator[Candidate]:
    """Candidates of all kinds; the first runs one microbatch after the other, and so fits into memory if any order does."""
    chunks = -(-problem.stages // problem.ranks)
    unit = problem.period() / (3 * chunks)
    streams = [problem.on(rank) for rank in range(problem.ranks)]
    seen: set[tuple[int, ...]] = set()
    left = max(_FEWEST, _EFFORT // problem.count)
    none = (0.0,) * (2 * chunks)
    longer = ((period, none) for period in _longer(problem))
    others = ((problem.period(), delays) for delays in _delays(2 * chunks, random))
    for period, delays in (each for pair in zip_longest(longer, others) for each in pair if each):
        ends = _ends(problem, [unit * each for each in delays])
        if period == problem.period() and _too_much(problem, ends, period):
            continue
        orders = [_order(problem, stages, ends, period) for stages in streams]
        key = tuple(map(hash, map(tuple, orders)))
        if key not in seen:
            seen.add(key)
            yield Candidate(orders, whole, [1.0] * problem.ranks)
        left -= 1
        if left == 0:
            return


def _order(problem: Problem, stages: Sequence[int], ends: Sequence[float], period: float) -> list[int]:
    """The forwards and backwards of these stages in the order of their times, and of the data flow for equal times."""
    timed = []
    for step, which in enumerate(_path(problem)):
        if which % problem.stages in stages:
            first = which * problem.microbatches
            timed += [(ends[which] + m * period, step, first + m) for m in range(problem.microbatches)]
    return [op for _, _, op in sorted(timed)]


def _path(problem: Problem) -> list[int]:
    """The path of a microbatch: its forwards 0..S-1, then its backwards S..2S-1 from the last stage down."""
    return [*range(problem.stages), *range(2 * problem.stages - 1, problem.stages - 1, -1)]


def _too_much(problem: Problem, ends: Sequence[float], period: float) -> bool:
    """Whether the activations of a pattern with one microbatch every period cannot fit into memory."""
    alive = [0.0] * problem.ranks
    for stage in range(problem.stages):
        at = stage * problem.microbatches
        life = ends[problem.stages + stage] - ends[stage] + problem.took[at]
        alive[problem.home[stage]] += problem.saved[stage] * min(problem.microbatches, life / period if period else 1)
    return any(count > cap * (1 + 1e-9) for count, cap in zip(alive, problem.cap, strict=True))


def _delays(legs: int, random: Random) -> list[tuple[float, ...]]:
    """Equal delays first; then all combinations in random order, or 2000 random ones if there are too many."""
    alike = [(slack,) * legs for slack in _SLACKS]
    if legs <= 4:
        every = list(product(_SLACKS, repeat=legs))
        random.shuffle(every)
        return alike + every
    return alike + [tuple(random.choice(_SLACKS) for _ in range(legs)) for _ in range(2000)]


def _longer(problem: Problem) -> Iterator[float]:
    """Longer periods: first the one that runs one microbatch after the other, then shorter ones."""
    way = sum(problem.took[:: problem.microbatches]) + sum(map(abs, problem.lag[:: problem.microbatches]))
    yield way + 1
    period = 1.2 * problem.period()
    while 0 < period <= way:
        yield period
        period *= 1.2


def _ends(problem: Problem, delays: Sequence[float]) -> list[float]:
    """The ends of microbatch 0's forwards, then of its backwards; `delays[leg]` precedes each step of a leg but the first."""
    stages, microbatches = problem.stages, problem.microbatches
    path = _path(problem)
    ends, now, before = [0.0] * (2 * stages), 0.0, -1
    for step, which in enumerate(path):
        leg = step * len(delays) // len(path)
        at = which * microbatches
        now += problem.lag[at] + problem.took[at] + (delays[leg] if leg == before else 0.0)
        ends[which] = now
        before = leg
    return ends
