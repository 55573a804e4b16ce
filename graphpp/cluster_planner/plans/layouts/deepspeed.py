"""A layout as the JSON configuration of DeepSpeed: the ZeRO stage, the batch and its microbatches.

The file says nothing of activation checkpointing, which a model does itself, and nothing of pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphpp.cluster_planner.plans.layouts.layout import WHOLE, Context, Layout, data_ranks, whole_number
from graphpp.errors import ScheduleError

_PRICED = {
    0: "",
    1: "ZeRO-1 is priced as dp_shard with whole stages kept: parameters are gathered and gradients reduced once a step.",
    2: "ZeRO-2 is priced as ZeRO-1, with whole stages kept and whole gradient sums until the end of the step.",
    3: "ZeRO-3 is priced as dp_shard with keep 0: computations gather single layers.",
}
_UNPRICED = (
    "offload_optimizer", "offload_param", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NAMED = ("zero_optimization", *_COUNTS)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def read_deepspeed(given: Mapping[str, Any], context: Context) -> Layout:
    zero = given.get("zero_optimization", {})
    if given.keys().isdisjoint(_NAMED) or not isinstance(zero, dict):
        raise ScheduleError(f"like: take the JSON of a plan, or of DeepSpeed with {', '.join(_NAMED)}: got {', '.join(given)}")
    stage = whole_number("zero_optimization.stage", zero.get("stage", 0), 0)
    if stage not in _PRICED:
        raise ScheduleError(f"like: zero_optimization.stage: take 0 to 3, got {stage}")
    tp = whole_number("autotp_size", (given.get("tensor_parallel") or {}).get("autotp_size") or 1)
    data = data_ranks(context.gpus, tp=tp)
    batch, rows, many = (None if given.get(name, "auto") == "auto" else whole_number(name, given[name]) for name in _COUNTS)
    if None not in (batch, rows, many) and batch != rows * many * data:  # type: ignore[operator]
        remedy = f"DeepSpeed demands {rows} x {many} x {data} data ranks"
        raise ScheduleError(f"like: train_batch_size {batch}: {remedy}: give other numbers or machines")
    if batch is None and None not in (rows, many):
        batch = rows * many * data  # type: ignore[operator]
    notes = [_PRICED[stage], "A DeepSpeed file has no pipeline stages: priced with one."]
    unread = [name for name in _UNPRICED if _is_used(zero.get(name))]
    notes += [f"Not priced: {', '.join(unread)}."] if unread else []
    sharded = {"dp_shard": data, "dp_replicate": 1} if stage else {"dp_shard": 1, "dp_replicate": data}
    counts = {"rows": rows, "microbatches": many}
    choices = {
        **{name: each for name, each in WHOLE.items() if name != "recompute"}, "pp": 1, "tp": tp, "ep": 1, "cp": 1, **sharded,
        "keep": 0 if stage == 3 and data > 1 else None, "schedule": "auto", "stages_per_rank": 1,
        **{name: each for name, each in counts.items() if each is not None},
    }  # fmt: skip
    notes.append("A DeepSpeed file has no recomputation: the search chooses the least that fits.")
    dtype = next((name for key, name in _DTYPES.items() if (given.get(key) or {}).get("enabled") is True), None)
    return Layout(choices, tuple(filter(None, notes)), batch, None, dtype)


def _is_used(value: Any) -> bool:
    return value.get("device", "none") != "none" if isinstance(value, dict) else value not in (None, False, 1)
