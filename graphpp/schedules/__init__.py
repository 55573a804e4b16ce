"""Schedules for users: the generators behind the names, functions that rewrite and check tables, Megatron-Core's tables.

Every generator maps (ranks, stages, microbatches) to a compute-only `Schedule`; so does any function that a user gives as
`schedule=`. With keyword parameters: `functools.partial(graphpp.schedules.megatron_interleaved, group=6)`.
This package never imports torch. Its packages, each importing only those before it in a line:
    table <- check <- rewrite <- generate, simulate <- draw, search <- this file
"""

from graphpp.schedules.any_form import check
from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.generate.gpipe_1f1b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b, plain_loop
from graphpp.schedules.generate.megatron_interleaved import (
    combined_1f1b,
    forward_only,
    from_orders,
    is_recomputed,
    megatron_interleaved,
    rank_microbatches,
    recompute_partially,
    schedule_table,
    table_to_order,
)
from graphpp.schedules.generate.names import ALIASES, SCHEDULES, auto, stage_ids
from graphpp.schedules.generate.v_half_v_min import v_half, v_min
from graphpp.schedules.generate.zbv_dualpipev import dual_pipe_v, zbv_zero_bubble
from graphpp.schedules.generate.zero_bubble import interleaved_zero_bubble, zb1p, zb2p
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import VERBS, batch_p2p
from graphpp.schedules.rewrite.split_backward import defer_weight_grads, split_backward
from graphpp.schedules.rewrite.unbatch_p2p import unbatch_p2p
from graphpp.schedules.search.recompute_ahead import recompute_ahead

__all__ = [
    "ALIASES",
    "SCHEDULES",
    "VERBS",
    "add_idle_cells",
    "add_send_recv",
    "auto",
    "batch_p2p",
    "check",
    "combined_1f1b",
    "defer_weight_grads",
    "dual_pipe_v",
    "forward_only",
    "from_orders",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "is_recomputed",
    "looped_bfs",
    "megatron_interleaved",
    "one_f_one_b",
    "peak_bytes",
    "plain_loop",
    "rank_microbatches",
    "recompute_ahead",
    "recompute_partially",
    "schedule_table",
    "split_backward",
    "stage_ids",
    "table_to_order",
    "unbatch_p2p",
    "v_half",
    "v_min",
    "zb1p",
    "zb2p",
    "zbv_zero_bubble",
]
