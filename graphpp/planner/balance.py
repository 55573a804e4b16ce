"""Distribute neighbouring segments over stages so that the heaviest stage is as light as possible, within a relative 1e-6.

Stages, from the last to the first, take segments up to a limit; bisection gives the least limit that places all segments. Later
stages take as many segments as they can, because early stages hold more microbatches. No seconds are negative, and there are at
least as many segments as stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from graphpp.planner.segments import Cut


def balanced(seconds: Sequence[float], stages: int, waits: Sequence[float] | None = None) -> Cut:
    """`waits`: by segment, seconds that count in a stage which starts there; they grow by at most a segment's seconds."""
    sums = [0.0, *accumulate(seconds)]
    starts = sums if waits is None else [own - wait for own, wait in zip(sums, [*waits, 0.0], strict=True)]
    low, high = max(*seconds, sums[-1] / stages), sums[-1] + (waits[-1] if waits else 0.0)
    best = _packed(sums, starts, stages, high)
    while high - low > max(1e-6 * high, 1e-300):
        limit = (low + high) / 2
        found = _packed(sums, starts, stages, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    assert best is not None, "the sum of all segments is within its own limit"
    return best


def _packed(sums: Sequence[float], starts: Sequence[float], stages: int, limit: float) -> Cut | None:
    """The first segments of stages within the limit; None if the segments need more stages."""
    cut, end = list[int](), len(sums) - 1
    for left in range(stages - 1, -1, -1):
        first = max(left, bisect_left(starts, sums[end] - limit * (1 + 1e-12), 0, end))
        if first >= end or (left == 0 and first > 0):
            return None
        cut.append(first)
        end = first
    return tuple(reversed(cut))
