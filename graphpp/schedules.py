"""Schedules for users: the functions behind the names, what can be done to a table, and Megatron-Core's tables.

Contract
    Every generator maps (ranks, stages, microbatches) to a compute-only `Schedule`; so does any function that a user
    gives as `schedule=`. With keyword parameters: `functools.partial(graphpp.schedules.megatron_interleaved, group=6)`.
"""

from graphpp.runtime.checker import check
from graphpp.runtime.classic import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b, plain_loop
from graphpp.runtime.clock import in_time
from graphpp.runtime.combined import combined_1f1b
from graphpp.runtime.communication import add_communication
from graphpp.runtime.controllable_memory import v_half, v_min
from graphpp.runtime.deferral import defer_weight_grads, split_backwards
from graphpp.runtime.even_odd import order_even_odd
from graphpp.runtime.forwards import forward_only
from graphpp.runtime.fuse import VERBS, fuse_communication
from graphpp.runtime.megatron import (
    from_orders,
    layered_order,
    megatron_interleaved,
    rank_microbatches,
    recompute_partially,
    recomputed,
    schedule_table,
    table_to_order,
)
from graphpp.runtime.memory import peak_bytes
from graphpp.runtime.schedules import ALIASES, SCHEDULES, auto, stage_ids
from graphpp.runtime.v_shaped import dual_pipe_v, zbv_zero_bubble
from graphpp.runtime.zero_bubble import interleaved_zero_bubble, zb1p, zb2p

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
