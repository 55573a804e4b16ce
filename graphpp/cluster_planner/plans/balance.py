"""Share neighbouring segments out among stages, so that the heaviest stage is as light as can be.

Contract
    in   the seconds of each segment, of which none is negative; the number of stages, at most that of the segments
    out  the first segment of each stage (`planner/segments.py`, `Cut`). No cut has a heaviest stage that is lighter by more
         than a share of 1e-6. Later stages take as many segments as they can: early ones hold more microbatches

A stage takes segments as long as their sum stays within a limit, from the last stage to the first; the least limit for which
the segments suffice is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from graphpp.planner.segments import Cut

_STEPS = 40  # of the bisection: a relative width of 1e-12 of the sum


def balanced(seconds: Sequence[float], stages: int) -> Cut:
    """The cut whose heaviest stage is lightest."""
    sums = [0.0, *accumulate(seconds)]
    low, high = max(*seconds, sums[-1] / stages), sums[-1]
    best = _packed(sums, stages, high)
    for _ in range(_STEPS):
        limit = (low + high) / 2
        found = _packed(sums, stages, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
        if high - low <= 1e-6 * high:
            break
    assert best is not None, "the sum of all segments is within its own limit"
    return best


def _packed(sums: Sequence[float], stages: int, limit: float) -> Cut | None:
    """The first segments of stages of which none is above the limit; None where the segments need more stages."""
    cut, end = list[int](), len(sums) - 1
    for left in range(stages - 1, -1, -1):
        first = max(left, bisect_left(sums, sums[end] - limit * (1 + 1e-12), 0, end))
        if first >= end or (left == 0 and first > 0):
            return None
        cut.append(first)
        end = first
    return tuple(reversed(cut))
