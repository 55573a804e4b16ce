"""Layouts of other systems: arguments of Megatron-LM, a TOML file of torchtitan, the JSON of DeepSpeed.

Contract: each is a complete layout, in which what is left out has the system's default. `Layout.notes` has a sentence for each
thing that graphpp prices in another way, or not at all. What cannot be a plan raises `ScheduleError`.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from graphpp.errors import ScheduleError
from graphpp.planner.megatron_layout import Layout as StageLetters

WHOLE: Mapping[str, Any] = {"recompute": None, "offload": None, "word_parts": False, "logits_tokens": None}
"""The choices that a complete layout leaves out."""
_ZERO = {
    1: "The distributed optimizer (ZeRO-1) is priced as dp_shard with whole stages kept: gathered and reduced once a step.",
    2: "ZeRO-2 is priced as ZeRO-1: dp_shard with whole stages kept, and whole gradient sums until the end of the step.",
    3: "ZeRO-3 is priced as dp_shard with keep 0: computations gather single layers.",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_SELECTIVE = "Selective recomputation is priced as graphpp's, of all light operations."


class Context(NamedTuple):
    """The numbers that decide how a reader understands a layout: `gpus` of the machines, repeated `layers` of the model."""

    gpus: int
    layers: int


class Layout(NamedTuple):
    """`choices`: by name of `fixed.CHOICES`. `question`: the batch, tokens of a row, dtype and float8 that it is for."""

    choices: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    question: Mapping[str, Any] = {}


class _Entries:
    """The entries of a layout. Those that are never asked for can be named."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise ScheduleError(f"like: {where.strip('.')}: take a table, got {given!r}")
        self._given, self._where, self._read = given, where, set[str]()

    def get(self, name: str, usual: Any = None) -> Any:
        self._read.add(name)
        return self._given.get(name, usual)

    def count(self, name: str, usual: int = 1, least: int = 1) -> int:
        value = self.get(name, usual)
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)) or int(value) < least:
            raise ScheduleError(f"like: {self._where}{name}: take an integer from {least}, got {value!r}")
        return int(value)

    def count_if(self, name: str, nothing: Any = None) -> int | None:
        return None if self.get(name) in (None, nothing) else self.count(name)

    def one(self, name: str, usual: Any, *words: Any) -> Any:
        value = self.get(name, usual)
        if value not in words:
            raise ScheduleError(f"like: {self._where}{name}: take {', '.join(map(str, words))}, got {value!r}")
        return value

    def unread(self, form: str) -> list[str]:
        """A note of the entries of this form that are set and were not read."""
        names = [name for name, value in self._given.items() if name not in self._read and value and re.search(form, name)]
        return [f"Not priced: {', '.join(self._where + name for name in names)}."] if names else []


def data_ranks(gpus: int, **sizes: int) -> int:
    """The ranks that these sizes leave to data parallelism. Raises `ScheduleError`."""
    ranks = prod(sizes.values())
    if gpus % ranks:
        given = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise ScheduleError(f"like: {given} makes {ranks} ranks, which do not divide {gpus} GPUs: take other sizes or machines")
    return gpus // ranks


class _Experts(NamedTuple):
    """`ep`: of the data ranks; `folded`: whether experts are spread over `cp` and `tp` too; `rest`: data ranks but for `ep`."""

    ep: int
    folded: bool
    rest: int


def _experts(data: int, ep: int, *, tp: int, cp: int, divided: bool) -> _Experts:
    """Experts over `ep` ranks. `divided`: ranks along `tp` divide each expert; otherwise these have other experts."""
    inside = tp * cp
    if inside == 1 or (divided and data % ep == 0):
        if data % ep:
            raise ScheduleError(f"like: ep {ep}: there are {data} data ranks for experts: take a divisor")
        return _Experts(ep, False, data // ep)
    over = f"like: ep {ep}: experts are spread over"
    if divided and tp > 1:
        raise ScheduleError(f"{over} data ranks where tp divides each, {data} here: take a divisor, or whole experts")
    if ep % inside or data % (ep // inside):
        raise ScheduleError(f"{over} tp x cp = {inside} ranks and a divisor of {data} data ranks together: take such a product")
    return _Experts(ep // inside, True, data // (ep // inside))


def read_megatron(text: str, context: Context) -> Layout:
    """The layout of an argument list, as of a shell; words that are no arguments are passed over."""
    given = _Entries(_arguments(text), "--")
    pp, tp = given.count("pipeline-model-parallel-size"), given.count("tensor-model-parallel-size")
    cp, ep = given.count("context-parallel-size"), given.count("expert-model-parallel-size")
    if given.count("num-layers", context.layers) != context.layers:
        raise ScheduleError(f"like: --num-layers {given.get('num-layers')}: the model has {context.layers} layers")
    etp, data = given.count("expert-tensor-parallel-size", tp), data_ranks(context.gpus, pp=pp, tp=tp, cp=cp)
    if etp not in (1, tp):
        raise ScheduleError(f"like: --expert-tensor-parallel-size {etp}: priced are 1 and that of attention, {tp}: take one")
    ep, folded, rest = _experts(data, ep, tp=tp, cp=cp, divided=etp == tp)
    zero = given.get("use-distributed-optimizer")
    notes = [_ZERO[1]] if zero else []
    choices = {
        **WHOLE, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "folded": folded,
        "dp_shard": rest if zero else 1, "dp_replicate": 1 if zero else rest, "keep": None,
        "recompute": given.one("recompute-granularity", None, None, "full", "selective"),
        **_megatron_stages(given, pp, context.layers),
    }  # fmt: skip
    if choices["recompute"] == "full" and given.one("recompute-method", "uniform", "uniform", "block") == "block":
        choices["recomputed"] = (given.count("recompute-num-layers"),)
    elif choices["recompute"] == "full" and given.count("recompute-num-layers") > 1:
        notes.append("Recomputation is priced with one saved input for each layer, in place of one for several.")
    if given.get("micro-batch-size"):
        choices["rows"] = given.count("micro-batch-size")
    if tp > 1 and not given.get("sequence-parallel"):
        notes.append("Tensor parallelism is priced with --sequence-parallel, which graphpp's always has.")
    notes += [_SELECTIVE] * (choices["recompute"] == "selective")
    dtype = next((name for flag, name in _DTYPES.items() if given.get(flag)), None)
    batch, tokens = given.count_if("global-batch-size"), given.count_if("seq-length")
    notes += given.unread("parallel|pipeline|recompute|offload|shard|fsdp|overlap|distributed|^fp[48]")
    return Layout(choices, tuple(notes), {"batch": batch, "tokens": tokens, "dtype": dtype})


def _arguments(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as fault:
        raise ScheduleError(f"like: Megatron's arguments: {fault}: give them as to a shell") from fault
    found, name = dict[str, Any](), ""
    for word in words:
        if word.startswith("--"):
            name, has, value = word[2:].partition("=")
            found[name] = value if has else True
        elif found.get(name) is True:
            found[name] = word
    return found


def _megatron_stages(given: _Entries, pp: int, layers: int) -> dict[str, Any]:
    """Equally many layers in each stage, or those of a layout."""
    if pp == 1:
        return {"schedule": "auto", "stages_per_rank": 1}
    letters, per_stage = given.get("pipeline-model-parallel-layout"), given.count_if("num-layers-per-virtual-pipeline-stage")
    per_rank = given.count("num-virtual-stages-per-pipeline-rank") if per_stage is None else max(1, layers // (pp * per_stage))
    per_rank = per_rank if letters is None else StageLetters(letters, ranks=pp).num_stages // pp
    if letters is None and layers % (pp * per_rank):
        said = f"{layers} layers do not divide among {pp} pipeline ranks with {per_rank} stages each, as Megatron demands"
        raise ScheduleError(f"like: {said}: give --pipeline-model-parallel-layout")
    split = letters or (layers // (pp * per_rank),) * (pp * per_rank)
    group = given.count("microbatch-group-size-per-virtual-pipeline-stage", pp)
    several = {"schedule": "MegatronInterleaved", "group": group} if per_rank > 1 else {"schedule": "1F1B"}
    return {**several, "stages_per_rank": per_rank, "split": split}


def read_torchtitan(text: str, context: Context) -> Layout:
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ScheduleError(f"like: the TOML of torchtitan: {fault}: correct it") from fault
    if "parallelism" not in given:
        raise ScheduleError("like: the TOML of torchtitan has its degrees in [parallelism]: write them there")
    mesh, training = _Entries(given["parallelism"], "parallelism."), _Entries(given.get("training", {}), "training.")
    pp, tp, cp, ep = (mesh.count(f"{name}_parallel_degree") for name in ("pipeline", "tensor", "context", "expert"))
    data, copies = data_ranks(context.gpus, pp=pp, tp=tp, cp=cp), mesh.count("data_parallel_replicate_degree")
    shards = mesh.count_if("data_parallel_shard_degree", -1) or data_ranks(data, dp_replicate=copies)
    if shards * copies != data:
        remedy = "give data_parallel_shard_degree = -1, or other machines"
        raise ScheduleError(f"like: {shards} x {copies} data ranks of {data} that {context.gpus} GPUs leave: {remedy}")
    divided = ep == 1 or mesh.count("expert_tensor_parallel_degree", 1) == tp
    ep, folded, shards_of_experts = _experts(shards, ep, tp=tp, cp=cp, divided=divided)
    policy = mesh.one("fsdp_reshard_after_forward", "default", "default", "always", "never")
    layers = shards > 1 and (policy == "always" or (policy == "default" and pp == 1))
    local = training.count("local_batch_size", 8)
    batch = training.count_if("global_batch_size", -1) or local * data
    notes = [f"{batch // (local * data)} accumulated batches are priced as one step."] if batch > local * data else []
    choices = {
        **WHOLE, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "folded": folded,
        "dp_replicate": copies, "dp_shard": shards_of_experts,
        "keep": 0 if layers else None, "rows": mesh.count("pipeline_parallel_microbatch_size") if pp > 1 else local,
        **_titan_stages(mesh, pp, context.layers),
        **_titan_recompute(_Entries(given.get("activation_checkpoint", {}), "activation_checkpoint."), notes),
    }  # fmt: skip
    question = {
        "batch": batch, "tokens": training.count_if("seq_len"), "dtype": training.get("mixed_precision_param", "bfloat16"),
        "float8": _titan_float8(given),
    }  # fmt: skip
    return Layout(choices, (*notes, *mesh.unread("^(?!disable_loss_parallel)")), question)


def _titan_stages(mesh: _Entries, pp: int, layers: int) -> dict[str, Any]:
    """torchtitan's split: embedding and head count as layers."""
    if pp == 1:
        return {"schedule": "auto", "stages_per_rank": 1}
    alone, several = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    name = mesh.one("pipeline_parallel_schedule", "1F1B", *alone, *several)
    first, last = (mesh.count(f"pipeline_parallel_{end}_stage_less_layers", 1, 0) for end in ("first", "last"))
    per_stage, counted = mesh.count_if("pipeline_parallel_layers_per_stage"), layers + first + last
    stages = pp * (1 if name in alone else 2) if per_stage is None else -(-counted // per_stage)
    if stages % pp:
        said = f"{layers} layers, with {first} less in the first stage and {last} in the last, in stages of {per_stage}"
        raise ScheduleError(f"like: {said} make {stages} stages, no multiple of {pp} ranks: take other layers per stage")
    counts = [counted // stages + (stage < counted % stages) for stage in range(stages)]
    return {"schedule": name, "stages_per_rank": stages // pp, "split": (counts[0] - first, *counts[1:-1], counts[-1] - last)}


def _titan_recompute(given: _Entries, notes: list[str]) -> dict[str, Any]:
    mode = given.one("mode", "selective", "none", "selective", "full")
    if mode == "selective" and given.get("selective_ac_option", "op") != "op":
        return {"recompute": "full", "recomputed": 1 / given.count("selective_ac_option")}
    notes += [_SELECTIVE] * (mode == "selective")
    return {"recompute": None if mode == "none" else mode}


def _titan_float8(given: Mapping[str, Any]) -> str | None:
    converters = _Entries(given.get("model", {}), "model.").get("converters", [])
    recipe = _Entries(given.get("float8", {}), "float8.").get("recipe_name") or "tensorwise"
    return recipe if "float8" in str(converters) else None


def read_deepspeed(document: Mapping[str, Any], context: Context) -> Layout:
    """A file says nothing of recomputation, which a model does itself, and nothing of pipeline stages."""
    given, zero = _Entries(document, ""), _Entries(document.get("zero_optimization", {}), "zero_optimization.")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if document.keys().isdisjoint(("zero_optimization", *names)):
        raise ScheduleError(f"like: take the JSON of a plan, or of DeepSpeed with zero_optimization, {', '.join(names)}")
    batch, rows, many = (given.count_if(name, "auto") for name in names)
    stage, data = zero.one("stage", 0, 0, 1, 2, 3), context.gpus
    if batch is None and rows and many:
        batch = rows * many * data
    counts = {name: each for name, each in (("rows", rows), ("microbatches", many)) if each}
    choices = {
        "pp": 1, "tp": 1, "ep": 1, "cp": 1, "folded": False,
        "dp_shard": data if stage else 1, "dp_replicate": 1 if stage else data, **WHOLE,
        "keep": 0 if stage == 3 and data > 1 else None, "schedule": "auto", "stages_per_rank": 1, **counts,
    }  # fmt: skip
    del choices["recompute"]
    notes = (
        *([_ZERO[stage]] if stage else []), "A DeepSpeed file has no pipeline stages: priced with one.",
        "A DeepSpeed file has no recomputation: the search chooses the least that fits.", *zero.unread("offload|hpz|quantized"),
        *given.unread("parallel"),
    )  # fmt: skip
    dtype = next((name for key, name in _DTYPES.items() if _Entries(document.get(key, {}), key).get("enabled") is True), None)
    return Layout(choices, notes, {"batch": batch, "dtype": dtype})
