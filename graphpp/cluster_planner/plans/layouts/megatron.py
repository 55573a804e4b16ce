"""A layout as arguments of Megatron-LM: `--pipeline-model-parallel-size 8 --micro-batch-size 1 --use-distributed-optimizer`.

The arguments are a complete layout: what they leave out has Megatron's default. Megatron gives each stage equally many layers.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from graphpp.cluster_planner.plans.layouts.layout import WHOLE, Context, Layout, data_ranks, expert_shape, whole_number
from graphpp.errors import ScheduleError
from graphpp.planner.megatron_layout import Layout as StageLetters

_READ = (
    "pipeline-model-parallel-size", "tensor-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
    "sequence-parallel", "use-distributed-optimizer", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "recompute-activations", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-virtual-pipeline-stage", "pipeline-model-parallel-layout", "use-megatron-fsdp",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "data-parallel-sharding-strategy",
)  # fmt: skip
_OF_LAYOUTS = re.compile(r"parallel|pipeline|recompute|offload|shard|fsdp|overlap|^fp8|^fp4|^deepep")
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_ZERO = "is priced as dp_shard with whole stages kept: gathered and reduced once a step, as ZeRO-1 does"


class _Arguments(dict[str, Any]):
    def count(self, name: str, usual: int) -> int:
        return whole_number(f"--{name}", self.get(name, usual))


def read_megatron(text: str, context: Context) -> Layout:
    """The layout of an argument list, as of a shell; words that are no arguments are passed over."""
    given = _arguments(text)
    pp, tp = given.count("pipeline-model-parallel-size", 1), given.count("tensor-model-parallel-size", 1)
    cp, ep = given.count("context-parallel-size", 1), given.count("expert-model-parallel-size", 1)
    if given.count("num-layers", context.layers or 1) != (context.layers or 1):
        raise ScheduleError(f"like: --num-layers {given['num-layers']}: the model has {context.layers} layers: give its list")
    copies = expert_shape(data_ranks(context.gpus, pp=pp, tp=tp, cp=cp), ep, "--expert-model-parallel-size")
    zero = _zero(given)
    sharded = {"dp_shard": copies, "dp_replicate": 1} if zero else {"dp_shard": 1, "dp_replicate": copies}
    choices = {
        **WHOLE, "pp": pp, "tp": tp, "cp": cp, "ep": ep, **sharded, "keep": 0 if zero == 3 else None,
        **_stages(given, pp, context.layers), **_recompute(given),
    }  # fmt: skip
    if "micro-batch-size" in given:
        choices["rows"] = given.count("micro-batch-size", 1)
    batch, tokens = (given.count(name, 1) if name in given else None for name in ("global-batch-size", "seq-length"))
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(next((name for name in ("bf16", "fp16") if name in given), ""))
    return Layout(choices, tuple(_notes(given, zero, ep, tp)), batch, tokens, dtype)


def _arguments(text: str) -> _Arguments:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as fault:
        raise ScheduleError(f"like: Megatron's arguments: {fault}: give them as to a shell") from fault
    found, name = _Arguments(), ""
    for word in words:
        if word.startswith("--"):
            name, has, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value if has else True
        elif found.get(name) is True:
            found[name] = word
    return found


def _zero(given: _Arguments) -> int:
    if "use-megatron-fsdp" in given:
        return _SHARDED.get(given.get("data-parallel-sharding-strategy", "no_shard"), 0)
    return 1 if "use-distributed-optimizer" in given else 0


def _stages(given: _Arguments, pp: int, layers: int) -> dict[str, Any]:
    if pp == 1:
        return {"schedule": "auto", "stages_per_rank": 1}
    letters = given.get("pipeline-model-parallel-layout")
    per_rank = given.count("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in given:
        per_rank = max(1, layers // (pp * given.count("num-layers-per-virtual-pipeline-stage", 1)))
    if letters is not None:
        per_rank = StageLetters(letters, ranks=pp).num_stages // pp
    split = letters if letters is not None else _counts(given, pp, per_rank, layers)
    if per_rank == 1:
        return {"schedule": "1F1B", "stages_per_rank": 1, "split": split}
    group = given.count("microbatch-group-size-per-virtual-pipeline-stage", pp)
    return {"schedule": "MegatronInterleaved", "stages_per_rank": per_rank, "group": group, "split": split}


def _counts(given: _Arguments, pp: int, per_rank: int, layers: int) -> tuple[int, ...]:
    """The layers of each stage. Raises `ScheduleError` where Megatron would refuse them."""
    embedding, loss = ("account-for-embedding-in-pipeline-split" in given, "account-for-loss-in-pipeline-split" in given)
    ends = [given.count(f"decoder-{end}-pipeline-num-layers", 0) if f"decoder-{end}-pipeline-num-layers" in given else None
            for end in ("first", "last")]  # fmt: skip
    others, rest = pp - sum(each is not None for each in ends), layers - sum(each or 0 for each in ends)
    of_rank, uneven = divmod(rest + embedding + loss, others) if others else (0, rest)
    ranks = [of_rank] * pp
    ranks[0], ranks[-1] = ends[0] or ranks[0], ends[1] or ranks[-1]
    if uneven or any(each % per_rank for each in ranks):
        remedy = "--pipeline-model-parallel-layout, or --decoder-first-pipeline-num-layers"
        stages = f"{pp} pipeline ranks with {per_rank} stages each"
        raise ScheduleError(f"like: {layers} layers do not divide among {stages}, as Megatron demands: give {remedy}")
    counts = [ranks[stage % pp] // per_rank for stage in range(pp * per_rank)]
    return (counts[0] - embedding, *counts[1:-1], counts[-1] - loss)


def _recompute(given: _Arguments) -> dict[str, Any]:
    kind = given.get("recompute-granularity", "selective" if "recompute-activations" in given else None)
    if kind not in (None, "full", "selective"):
        raise ScheduleError(f"like: --recompute-granularity: take full or selective, got {kind!r}")
    block = kind == "full" and given.get("recompute-method") == "block"
    return {"recompute": kind, **({"recomputed": (given.count("recompute-num-layers", 1),)} if block else {})}


def _notes(given: _Arguments, zero: int, ep: int, tp: int) -> list[str]:
    notes = []
    if zero in (1, 2):
        notes.append(f"{'--use-distributed-optimizer' if zero == 1 else 'The sharding of gradients'} {_ZERO}.")
    if tp > 1 and "sequence-parallel" not in given:
        notes.append("Tensor parallelism is priced with --sequence-parallel, which graphpp's always has.")
    if ep > 1 and str(given.get("expert-tensor-parallel-size", tp)) != str(tp):
        notes.append("Experts are priced with the tensor parallelism of the attention: graphpp has one mesh for both.")
    if given.get("recompute-granularity") == "selective":
        notes.append("Selective recomputation is priced as graphpp's, of all light operations, not of chosen modules.")
    if given.get("recompute-method") == "uniform" and str(given.get("recompute-num-layers", 1)) != "1":
        notes.append("Recomputation is priced with one saved input for each layer, in place of one for several.")
    known = {*_READ, "expert-tensor-parallel-size"}
    unread = [f"--{name}" for name in given if _OF_LAYOUTS.search(name) and name not in known]
    return [*notes, *([f"Not priced: {', '.join(unread)}."] if unread else [])]
