"""The schedules known by name: functions from (ranks, stages, microbatches) to a compute-only `Schedule` that `check` accepts.

To add a schedule: write its generator in the file of its family, decorated with `placement.stages_per_rank` if it takes several
stages per rank, and enter it in `SCHEDULES`. `graphpp.schedules` exports the function itself to users.
"""

from __future__ import annotations

from collections.abc import Callable

from graphpp.arguments import COUNT, checked
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.gpipe_1f1b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b, plain_loop
from graphpp.schedules.generate.megatron_interleaved import combined_1f1b, forward_only, megatron_interleaved
from graphpp.schedules.generate.v_half_v_min import v_half, v_min
from graphpp.schedules.generate.zbv_dualpipev import dual_pipe_v, zbv_zero_bubble
from graphpp.schedules.generate.zero_bubble import interleaved_zero_bubble, zb1p, zb2p
from graphpp.schedules.table.placement import stage_ids as stage_ids
from graphpp.schedules.table.schedule import Schedule

Generator = Callable[[int, int, int], Schedule]


@checked(ScheduleError, ranks=COUNT, stages=COUNT, microbatches=COUNT)
def auto(ranks: int, stages: int, microbatches: int) -> Schedule:
    """The plain loop on one rank, 1F1B for one stage per rank, Interleaved1F1B for several."""
    if ranks == 1:
        return plain_loop(ranks, stages, microbatches)
    return (one_f_one_b if stages == ranks else interleaved_1f1b)(ranks, stages, microbatches)


SCHEDULES: dict[str, Generator] = {
    "auto": auto,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Interleaved1F1B": interleaved_1f1b,
    "LoopedBFS": looped_bfs,
    "MegatronInterleaved": megatron_interleaved,
    "Combined1F1B": combined_1f1b,
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZB1P": zb1p,
    "ZB2P": zb2p,
    "ZBVZeroBubble": zbv_zero_bubble,
    "DualPipeV": dual_pipe_v,
    "V-Half": v_half,
    "V-Min": v_min,
    "ForwardOnly": forward_only,
}
ALIASES = {"ZB-H1": "ZB1P", "ZB-H2": "ZB2P"}
"""Other names of the same schedules."""
