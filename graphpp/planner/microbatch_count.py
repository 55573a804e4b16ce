"""The numbers of stages and microbatches where the user leaves them open, equal on every rank."""

from __future__ import annotations

from collections.abc import Callable

from graphpp.batch.cut_batch import batch_size
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.options.options import Options
from graphpp.schedules.generate.read import default_stages


def stages_of(options: Options, ranks: int) -> int:
    """The number of stages that the schedule asks for where the split leaves it open."""
    return default_stages(options.schedule, ranks)


def usual_microbatches(options: Options, ranks: int) -> int:
    """The number of microbatches given, else 4 a rank; 1 in one process."""
    return options.microbatches or (4 * ranks if ranks > 1 else 1)


def microbatches_for(options: Options, ranks: int, batch: FlatMicrobatch, admits: Callable[[int], bool]) -> int:
    """The number given; else 1 in one process; else the largest divisor of the batch's rows, up to 4 a rank, that fits.

    Of a batch with fewer rows than the number given, the largest number up to the rows that fits. `admits(count)` says whether
    the schedule has a table for `count` microbatches. If no number fits, the first one is returned, and cutting the batch or
    making the table raises the error that says why. Raises `BatchError` for a batch without rows.
    """
    most = usual_microbatches(options, ranks)
    if most == 1:
        return most
    rows = batch_size(batch)
    if options.microbatches is not None:
        fewer = (count for count in range(min(most, rows), 0, -1) if count == most or admits(count))
        return next(fewer, most)
    divisors = [count for count in range(most, 0, -1) if rows % count == 0]
    return next((count for count in divisors if admits(count)), divisors[0])
