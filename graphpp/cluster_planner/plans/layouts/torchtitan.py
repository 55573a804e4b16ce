"""A layout as a TOML file of torchtitan: its parallelism, rows, activation checkpointing and float8.

The file is a complete layout: what it leaves out has torchtitan's default. torchtitan counts the embedding and the head as a
layer each when it cuts stages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from graphpp.cluster_planner.plans.layouts.layout import WHOLE, Context, Layout, data_ranks, expert_shape, whole_number
from graphpp.errors import ScheduleError

_ALONE = ("1f1b", "gpipe")
_READ = (
    *(f"{name}_parallel_degree" for name in ("pipeline", "tensor", "context", "expert")), "data_parallel_replicate_degree",
    "data_parallel_shard_degree", "fsdp_reshard_after_forward", "pipeline_parallel_schedule", "module_fqns_per_model_part",
    "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers", "disable_loss_parallel",
)  # fmt: skip
_NAMES = {
    name.lower(): name
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}


def read_torchtitan(text: str, context: Context) -> Layout:
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ScheduleError(f"like: the TOML of torchtitan: {fault}") from fault
    mesh, training = _table(given, "parallelism"), _table(given, "training")
    moved = [f"[{table}] {name}" for table, values in given.items() if table != "parallelism" and isinstance(values, dict)
             for name in values if "_parallel_" in name and name != "enable_async_tensor_parallel"]  # fmt: skip
    if moved or "parallelism" not in given:
        said = "torchtitan has its degrees in [parallelism]: write them there"
        raise ScheduleError(f"like: {', '.join(moved) or 'the TOML'}: {said}")
    pp, tp, cp, ep = (_size(mesh, f"{name}_parallel_degree") for name in ("pipeline", "tensor", "context", "expert"))
    data = data_ranks(context.gpus, pp=pp, tp=tp, cp=cp)
    copies = _size(mesh, "data_parallel_replicate_degree")
    shards = mesh.get("data_parallel_shard_degree", -1)
    shards = data_ranks(data, dp_replicate=copies) if shards == -1 else whole_number("data_parallel_shard_degree", shards)
    if shards * copies != data:
        remedy = "give data_parallel_shard_degree = -1, or other machines"
        raise ScheduleError(f"like: {shards} x {copies} data ranks of {data} that {context.gpus} GPUs leave: {remedy}")
    local = whole_number("local_batch_size", training.get("local_batch_size", training.get("batch_size", 8)))
    rows = local if pp == 1 else _size(mesh, "pipeline_parallel_microbatch_size")
    batch = training.get("global_batch_size", -1)
    batch = local * data if batch in (-1, None) else whole_number("global_batch_size", batch)
    length = training.get("seq_len")
    times = batch // (local * data)
    notes = [f"{times} accumulated batches are priced as one step of more microbatches."] if times > 1 else []
    unread = [name for name, value in mesh.items() if name not in _READ and value]
    notes += [f"Not priced: {', '.join(unread)}."] if unread else []
    choices = {
        **WHOLE, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_replicate": copies, "rows": rows,
        "dp_shard": expert_shape(shards, ep, "expert_parallel_degree"), "keep": _keep(mesh, pp, shards),
        **_stages(mesh, pp, context.layers), **_recompute(_table(given, "activation_checkpoint", {"mode": "selective"}), notes),
    }  # fmt: skip
    dtype = training.get("mixed_precision_param", "bfloat16")
    return Layout(choices, tuple(notes), batch, length and whole_number("seq_len", length), dtype, _float8(given))


def _table(given: Mapping[str, Any], name: str, usual: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    found = given.get(name, usual or {})
    if not isinstance(found, dict):
        raise ScheduleError(f"like: [{name}]: take a table, got {found!r}")
    return found


def _size(mesh: Mapping[str, Any], name: str) -> int:
    return whole_number(name, mesh.get(name, 1))


def _keep(mesh: Mapping[str, Any], pp: int, shards: int) -> int | None:
    """Whole stages stay where FSDP does not reshard after a forward: by default, in a pipeline."""
    policy = mesh.get("fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        raise ScheduleError(f"like: fsdp_reshard_after_forward: take default, always or never, got {policy!r}")
    return 0 if shards > 1 and (policy == "always" or (policy == "default" and pp == 1)) else None


def _stages(mesh: Mapping[str, Any], pp: int, layers: int) -> dict[str, Any]:
    if pp == 1:
        return {"schedule": "auto", "stages_per_rank": 1}
    name = str(mesh.get("pipeline_parallel_schedule", "1F1B"))
    if name.lower() not in _NAMES or mesh.get("pipeline_parallel_schedule_csv"):
        raise ScheduleError(f"like: pipeline_parallel_schedule: take {', '.join(_NAMES.values())}, without a CSV, got {name!r}")
    parts = mesh.get("module_fqns_per_model_part")
    if parts:
        named = {"schedule": _NAMES[name.lower()], "stages_per_rank": len(parts) // pp}
        return {**named, "split": tuple(part[0] for part in parts[1:])}
    first, last = (whole_number(key, mesh.get(key, 1), 0) for key in (f"pipeline_parallel_{end}_stage_less_layers"
                   for end in ("first", "last")))  # fmt: skip
    per_stage = mesh.get("pipeline_parallel_layers_per_stage")
    stages, counted = pp * (1 if name.lower() in _ALONE else 2), layers + first + last
    if per_stage is not None:
        stages = -(-counted // whole_number("pipeline_parallel_layers_per_stage", per_stage))
    if stages % pp:
        said = f"{layers} layers, {first} less in the first stage and {last} less in the last, in stages of {per_stage}"
        raise ScheduleError(f"like: {said} make {stages} stages, no multiple of {pp} ranks: take other layers per stage")
    counts = [counted // stages + (stage < counted % stages) for stage in range(stages)]
    split = (counts[0] - first, *counts[1:-1], counts[-1] - last)
    return {"schedule": _NAMES[name.lower()], "stages_per_rank": stages // pp, "split": split}


def _recompute(given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    mode, every = given.get("mode", "selective"), given.get("selective_ac_option", "op")
    if mode in ("none", "full"):
        return {"recompute": None if mode == "none" else mode}
    if mode != "selective":
        raise ScheduleError(f"like: activation_checkpoint.mode: take none, selective or full, got {mode!r}")
    if every != "op":
        share = 1 / whole_number("selective_ac_option", every)
        return {"recompute": "full", "recomputed": share}
    notes.append("Selective recomputation is priced as graphpp's, of all light operations: torchtitan also recomputes every "
                 "second matrix product.")  # fmt: skip
    return {"recompute": "selective"}


def _float8(given: Mapping[str, Any]) -> str | None:
    converters = [str(each) for each in _table(given, "model").get("converters", [])]
    if not any("float8" in each for each in converters):
        return None
    table = given.get("float8") or _table(_table(_table(given, "quantize"), "linear"), "float8")
    return str(table.get("recipe_name") or "tensorwise")
