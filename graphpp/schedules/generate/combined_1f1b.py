"""Combined 1F1B: the forward of one microbatch overlapped with the backward of another, so that each hides the other's waits.

Contract
    The parts of an overlap `(xFy;zBw)OVERLAP_F_B` never depend on each other. The purpose is that the expert all-to-all of
    one part runs under the attention and the MLP of the other (Megatron-Core, `overlap_moe_expert_parallel_comm`). In the
    pictures a column is one unit of time, the same for an F, a B and an overlap of both; `.` is a rank that waits.
"""

from __future__ import annotations

from graphpp.schedules.generate.megatron_interleaved import least_group, schedule_table
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import per_rank, stages_per_rank
from graphpp.schedules.table.schedule import Schedule


@stages_per_rank(2, alone=1)
def combined_1f1b(ranks: int, stages: int, microbatches: int, *, group: int | None = None) -> Schedule:
    """On one rank F0, then each backward with the next microbatch's forward, then the last backward.

    r0 0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2

    Several stages on one rank: the forward goes down the stages while the backward comes up. On several ranks this
    is Megatron's interleaved 1F1B with one more forward in the warm-up; with the usual warm-up the first pair on
    the last rank would be the forward and the backward of one microbatch. `group` as in `megatron_interleaved`.
    """
    chunks = per_rank("Combined1F1B", ranks, stages, microbatches)
    if ranks == 1:
        steps, warm_ups = schedule_table(microbatches, chunks, 1), [chunks]
    else:
        size = least_group("Combined1F1B", ranks, microbatches, group)
        steps = schedule_table(microbatches, chunks, size)
        warm_ups = [min(len(steps), 2 * (ranks - rank) - 1 + (chunks - 1) * size) for rank in range(ranks)]
    rows = [_row(rank, ranks, chunks, steps, warm_up) for rank, warm_up in enumerate(warm_ups)]
    return Schedule(add_idle_cells(rows, stages), stages, microbatches, "Combined1F1B")


def _row(rank: int, ranks: int, chunks: int, steps: list[tuple[int, int]], warm_up: int) -> list[Action]:
    forwards = [Action(chunk * ranks + rank, Kind.F, microbatch) for microbatch, chunk in steps]
    backwards = [Action((chunks - 1 - chunk) * ranks + rank, Kind.B, microbatch) for microbatch, chunk in steps]
    overlaps = [Action(-1, Kind.OVERLAP_F_B, None, parts) for parts in zip(forwards[warm_up:], backwards, strict=False)]
    return [*forwards[:warm_up], *overlaps, *backwards[len(overlaps) :]]
