"""The numbers of stages and microbatches if the user does not give them, equal on every rank."""

from __future__ import annotations

from collections.abc import Callable

from graphpp.options.options import Options
from graphpp.schedules.generate.read import default_stages


def stages_of(options: Options, ranks: int) -> int:
    return default_stages(options.schedule, ranks)


def usual_microbatches(options: Options, ranks: int) -> int:
    """The given number of microbatches; else 4 per rank, or 1 in one process."""
    return options.microbatches.count or (4 * ranks if ranks > 1 else 1)


def microbatches_for(options: Options, ranks: int, rows: int, admits: Callable[[int], bool]) -> int:
    """The given number; else 1 in one process; else the largest admitted divisor of the batch's rows, up to 4 per rank.

    A batch with fewer rows than the given number gets the largest admitted number up to its rows. `admits(count)`: whether the
    schedule has a table for `count`. If no number is admitted, the first candidate is returned, and a later step raises the
    error with the reason.
    """
    most = usual_microbatches(options, ranks)
    if most == 1:
        return most
    if options.microbatches.count is not None:
        fewer = (count for count in range(min(most, rows), 0, -1) if count == most or admits(count))
        return next(fewer, most)
    divisors = [count for count in range(most, 0, -1) if rows % count == 0]
    return next((count for count in divisors if admits(count)), divisors[0])
