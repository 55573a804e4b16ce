"""Schedules for users: the functions behind the names, what can be done to a table, and Megatron-Core's tables.

Contract
    Every generator maps (ranks, stages, microbatches) to a compute-only `Schedule`; so does any function that a user
    gives as `schedule=`. With keyword parameters: `functools.partial(graphpp.schedules.megatron_interleaved, group=6)`.
"""

from graphpp.schedules.check.checker import check
from graphpp.schedules.check.peak_memory import peak_bytes
from graphpp.schedules.generate.combined_1f1b import combined_1f1b
from graphpp.schedules.generate.forward_only import forward_only
from graphpp.schedules.generate.gpipe_1f1b import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b, plain_loop
from graphpp.schedules.generate.megatron_interleaved import (
    from_orders,
    layered_order,
    megatron_interleaved,
    rank_microbatches,
    recompute_partially,
    recomputed,
    schedule_table,
    table_to_order,
)
from graphpp.schedules.generate.names import ALIASES, SCHEDULES, auto, stage_ids
from graphpp.schedules.generate.v_half_v_min import v_half, v_min
from graphpp.schedules.generate.zbv_dualpipev import dual_pipe_v, zbv_zero_bubble
from graphpp.schedules.generate.zero_bubble import interleaved_zero_bubble, zb1p, zb2p
from graphpp.schedules.rewrite.add_idle_cells import in_time
from graphpp.schedules.rewrite.add_send_recv import add_communication
from graphpp.schedules.rewrite.batch_p2p import VERBS, fuse_communication
from graphpp.schedules.rewrite.split_backward import defer_weight_grads, split_backwards
from graphpp.schedules.rewrite.unbatch_p2p import order_even_odd

__all__ = [
    "ALIASES",
    "SCHEDULES",
    "VERBS",
    "add_communication",
    "auto",
    "check",
    "combined_1f1b",
    "defer_weight_grads",
    "dual_pipe_v",
    "forward_only",
    "from_orders",
    "fuse_communication",
    "gpipe",
    "in_time",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "layered_order",
    "looped_bfs",
    "megatron_interleaved",
    "one_f_one_b",
    "order_even_odd",
    "peak_bytes",
    "plain_loop",
    "rank_microbatches",
    "recompute_partially",
    "recomputed",
    "schedule_table",
    "split_backwards",
    "stage_ids",
    "table_to_order",
    "v_half",
    "v_min",
    "zb1p",
    "zb2p",
    "zbv_zero_bubble",
]
