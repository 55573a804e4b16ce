"""Orders to begin with: stable patterns, in which every microbatch goes the same way, one period after the last.

Contract
    A pattern is a time for each forward and backward; the order on a rank is that of the times. Microbatch m's are those
    of microbatch 0 and m periods. Within a microbatch each step follows the one before it after a delay that is the
    same for all steps of a leg, where a leg is one way through all ranks. The delays decide how long activations
    live, so how many microbatches fit into memory, and where on each rank the gaps are (Qi et al., arXiv:2405.15362,
    who build such patterns for two stages a rank). 1F1B, ZB-H1, ZBV, V-Half and V-Min are among them.

Times that are on top of each other do no harm: the order is all that is taken from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from graphpp.runtime.search.decode import Candidate
from graphpp.runtime.search.problem import Problem

_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""What a step may wait, in operations of mean length; halves, so that a pattern of two ranks can take turns."""

_MOST = 1500
"""How many patterns are looked at; where legs have more combinations of delays, a random choice of them."""


def order(problem: Problem, times: Sequence[float]) -> list[list[int]]:
    """Per rank its forwards and backwards by their times."""
    orders: list[list[int]] = [[] for _ in range(problem.ranks)]
    for op in range(2 * problem.count):
        orders[problem.home[op % problem.count // problem.microbatches]].append(op)
    return [sorted(ops, key=times.__getitem__) for ops in orders]


def patterns(problem: Problem, whole: bytearray, random: Random) -> Iterator[Candidate]:
    """Candidates of all kinds; among them one that runs a microbatch after the other, so fits wherever one does."""
    chunks = -(-problem.stages // problem.ranks)
    unit = problem.period() / (3 * chunks)
    seen = set()
    for stretch, delays in (*((1.0, delays) for delays in _delays(2 * chunks, random)), *_stretched(problem, chunks)):
        times = _times(problem, [unit * each for each in delays], problem.period() * stretch)
        orders = order(problem, times)
        key = tuple(map(tuple, orders))
        if key not in seen:
            seen.add(key)
            yield Candidate(orders, whole, [1.0] * problem.ranks)


def _delays(legs: int, random: Random) -> list[tuple[float, ...]]:
    if len(_SLACKS) ** legs <= _MOST:
        return list(product(_SLACKS, repeat=legs))
    alike = [(slack,) * legs for slack in _SLACKS]
    return alike + [tuple(random.choice(_SLACKS) for _ in range(legs)) for _ in range(_MOST // 3)]


def _stretched(problem: Problem, chunks: int) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Less and less at a time, without delays, down to one microbatch after the other."""
    way = sum(problem.took[:: problem.microbatches]) + sum(map(abs, problem.lag[:: problem.microbatches]))
    stretch = 1.0
    while stretch * problem.period() <= way:
        stretch *= 1.2
        yield stretch, (0.0,) * (2 * chunks)


def _times(problem: Problem, delays: Sequence[float], period: float) -> list[float]:
    """The end of every operation; `delays[leg]` is waited before each step within a leg."""
    stages, microbatches, count = problem.stages, problem.microbatches, problem.count
    path = [(stage, 0) for stage in range(stages)] + [(stage, count) for stage in reversed(range(stages))]
    times, now, before = [0.0] * (2 * count), 0.0, -1
    for step, (stage, offset) in enumerate(path):
        leg = step * len(delays) // len(path)
        first = offset + stage * microbatches
        now += problem.lag[first] + problem.took[first] + (delays[leg] if leg == before else 0.0)
        times[first : first + microbatches] = [now + m * period for m in range(microbatches)]
        before = leg
    return times
