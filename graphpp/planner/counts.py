"""The numbers of stages and microbatches where the user leaves them open."""

from __future__ import annotations

from graphpp.batch.cut_batch import batch_size
from graphpp.batch.microbatch import Microbatch
from graphpp.errors import ScheduleError
from graphpp.options.options import Options
from graphpp.schedules.generate.read import default_stages, make_table


def stages_of(options: Options, ranks: int) -> int:
    """The number of stages that the schedule asks for where the split leaves it open."""
    return default_stages(options.schedule, ranks)


def usual_microbatches(options: Options, ranks: int) -> int:
    """The number of microbatches given, else 4 a rank; 1 in one process."""
    return options.microbatches or (4 * ranks if ranks > 1 else 1)


def microbatches_for(options: Options, ranks: int, batch: Microbatch) -> int:
    """The number given; else 1 in one process; else the largest that batch and schedule admit, up to 4 a rank."""
    most = usual_microbatches(options, ranks)
    if options.microbatches is not None or ranks == 1:
        return most
    size = batch_size(batch)
    fitting = [count for count in range(most, 0, -1) if size % count == 0]
    return next((count for count in fitting if _admits(options, ranks, count)), fitting[0])


def _admits(options: Options, ranks: int, microbatches: int) -> bool:
    try:
        make_table(options.schedule, ranks, stages_of(options, ranks), microbatches)
    except ScheduleError:
        return False
    return True
