"""Forward-only: the table of evaluation, without any backward.

Contract
    Each (stage, microbatch) has one F and no other action, so `graphpp.schedules.check.checker.check` refuses the table for
    training. `Schedule.forward_only` makes the same kind of table from an existing schedule.
"""

from __future__ import annotations

from graphpp.schedules.generate.megatron_interleaved import schedule_table
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import per_rank
from graphpp.schedules.table.schedule import Schedule


def forward_only(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Forwards in rounds of `ranks` microbatches, each round through all of a rank's stages.

    r0 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    r1 .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

    Any number of stages per rank, placed in a loop; on one rank a microbatch runs through all stages before the
    next one starts. The order is that of Megatron-Core's interleaved schedule with `forward_only`.
    """
    chunks = per_rank("ForwardOnly", ranks, stages, microbatches)
    steps = schedule_table(microbatches, chunks, ranks)
    rows = [[Action(chunk * ranks + rank, Kind.F, m) for m, chunk in steps] for rank in range(ranks)]
    return Schedule(add_idle_cells(rows, stages), stages, microbatches, "ForwardOnly")
