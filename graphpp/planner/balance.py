"""Distribute neighbouring segments over stages so that the heaviest stage is as light as possible, within a relative 1e-6.

Stages, from the last to the first, take segments up to a limit; bisection gives the least limit that places all segments. Later
stages take as many segments as they can, because early stages hold more microbatches. No seconds are negative, and there are at
least as many segments as stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from graphpp.planner.segments import Cut


def balanced(seconds: Sequence[float], stages: int, waits: Sequence[float] | None = None) -> Cut:
    """`waits`: by segment, seconds that count in a stage which starts there; they grow by at most a segment's seconds."""
    sums = [0.0, *accumulate(seconds)]
    starts = sums if waits is None else [own - wait for own, wait in zip(sums, [*waits, 0.0], strict=True)]
    low, high = max(*seconds, sums[-1] / stages), sums[-1] + (waits[-1] if waits else 0.0)
    best = _least(low, high, lambda limit: _packed([(sums, starts)] * stages, limit))
    assert best is not None, "the sum of all segments is within its own limit"
    return best


def balanced_on(
    seconds: Sequence[Sequence[float]], kinds: Sequence[int], held: Sequence[Sequence[float]] | None = None
) -> Cut | None:
    """The cut for stages on unlike devices: the segments of stage s take `seconds[kinds[s]]`. `held`: for each stage, the share
    of its memory that each segment takes; a stage may hold all of its memory. None if no cut is within the memory."""
    if held is None and len(set(kinds)) == 1:
        return balanced(seconds[kinds[0]], len(kinds))
    sums = [[0.0, *accumulate(each)] for each in seconds]
    lines = [sums[kind] for kind in kinds]
    filled = [[0.0, *accumulate(each)] for each in held or ()]
    widest = max(max(seconds[kind]) for kind in set(kinds))

    def within(limit: float) -> Cut | None:
        found = None if held else _packed([(line, line) for line in lines], limit)
        # later stages that take all they can may leave a stage a segment that alone takes too long on its device
        return found or (_reached(lines, filled, limit) if held or limit < widest else None)

    least = [min(each) for each in zip(*(seconds[kind] for kind in set(kinds)), strict=True)]
    high = max(line[-1] for line in lines)
    return _least(max(*least, sum(least) / len(kinds)), high, within)


def _least(low: float, high: float, within: Callable[[float], Cut | None]) -> Cut | None:
    """The cut within the least limit from `low` to `high`; None if there is none within `high`."""
    best = within(high)
    while best is not None and high - low > max(1e-6 * high, 1e-300):
        limit = (low + high) / 2
        found = within(limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    return best


def _packed(lines: Sequence[tuple[Sequence[float], Sequence[float]]], limit: float) -> Cut | None:
    """The first segments of stages within the limit; None if the segments need more stages. `lines`: for each stage, sums of
    seconds up to each segment, and those sums without the waits there."""
    cut, end = list[int](), len(lines[0][0]) - 1
    for left in range(len(lines) - 1, -1, -1):
        sums, starts = lines[left]
        first = max(left, bisect_left(starts, sums[end] - limit * (1 + 1e-12), 0, end))
        if first >= end or (left == 0 and first > 0):
            return None
        cut.append(first)
        end = first
    return tuple(reversed(cut))


def _reached(lines: Sequence[Sequence[float]], filled: Sequence[Sequence[float]], limit: float) -> Cut | None:
    """As `_packed`, by trying every first segment of every stage; each stage ends as early as it can."""
    ends, following = [len(lines[0]) - 1], list[dict[int, int]]()
    for stage in range(len(lines) - 1, -1, -1):
        allowed = [(lines[stage], limit * (1 + 1e-12)), *([(filled[stage], 1.0 + 1e-12)] if filled else [])]
        next_end = dict[int, int]()
        for end, before in pairwise([*reversed(ends), stage]):  # the nearest end is the best one
            for first in range(end - 1, max(before, stage) - 1, -1):
                if any(sums[end] - sums[first] > most for sums, most in allowed):
                    break
                next_end[first] = end
        ends = sorted(next_end)
        following.append(next_end)
    cut = [0] if 0 in following[-1] else []
    for next_end in reversed(following[1:] if cut else []):
        cut.append(next_end[cut[-1]])
    return tuple(cut) if cut else None
