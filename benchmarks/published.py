"""Compare predicted tokens per second and GPU with published measurements, in the published settings.

    python benchmarks/published.py [--group NAME ...] [--only NAME ...]

The runs are those of benchmarks/published/ (`published_runs.py`); without options, the ones of docs/planner/published.md.
Nothing runs on a GPU: each model is captured on the meta device (seconds to a minute), and its published mesh, schedule and
microbatches are priced, as `graphpp.plan(like=, search=False)` does: the published layouts are not searched for. What other
systems have beyond graphpp's runtime is a part of the price: exchanges along `tp` or `ep` that overlap with computations.
With `--group` (no name: all groups), the tables of `published_summary.py` follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from published_runs import DEVICES, Fleet, Model, Run, Settings, read_runs
from published_summary import NOISE, choices, error_bars, summary
from rich.console import Console
from rich.table import Table
from torch import Tensor

import graphpp
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import ModelCosts, SegmentKind, Variant
from graphpp.cluster_planner.costs.operations import Operation, Size, summed
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.cluster_planner.plans.training_plan import StepSeconds
from graphpp.devices import A100, H100_SXM, H200, Curve, Machines

KNOWN = {  # by the names of the runs
    "A100": A100, "H100": H100_SXM, "H200": H200,
    "A100 40 GB": replace(A100, name="A100 40 GB", memory_bandwidth=1.555e12, memory=40 * 10**9),
    "H100 96 GB": replace(H100_SXM, name="H100 96 GB", memory_bandwidth=2.4e12, memory=96 * 10**9),  # HBM2e, of torchtitan
    "H800": replace(H100_SXM, name="H800", inside=replace(H100_SXM.inside, bandwidth=200e9)),  # NVLink with 400 GB/s both ways
}  # fmt: skip
# Attention kernels before those of the devices' own curves, forward and backward. FlashAttention 2 on an H100, heads of 128:
# the figures of arXiv 2407.08608, 512 to 16,384 tokens (causal; backward: of full squares, times the ratio of both forwards).
# FlashAttention 1 on an A100: 30 to 50 and 25 to 35 % of the peak (arXiv 2307.08691); on an H100 its multiprocessors times its
# clock make the same kernels 1.52 times as fast.
KERNELS = {
    ("H", "flash 2"): (
        Curve(((3.4e10, 0.193), (6.9e10, 0.263), (1.37e11, 0.301), (2.75e11, 0.323), (5.5e11, 0.337), (1.1e12, 0.339))),
        Curve(((8.6e10, 0.134), (1.7e11, 0.195), (3.4e11, 0.242), (6.9e11, 0.272), (1.4e12, 0.289), (2.75e12, 0.295))),
    ),
    ("A", "flash 1"): (Curve(((1e9, 0.40),)), Curve(((1e9, 0.30),))),
    ("H", "flash 1"): (Curve(((1e9, 0.19),)), Curve(((1e9, 0.144),))),
}
SMALL_STAGES = 16  # of a rank, where a system hides gathers and reductions under the layers of a pipeline of one rank
CONFIGS = {
    "llama": transformers.LlamaConfig, "gpt": transformers.Starcoder2Config, "mixtral": transformers.MixtralConfig,
    "qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig, "deepseek_v3": transformers.DeepseekV3Config,
}  # fmt: skip
LATENT = {  # multi-head latent attention, which transformers' own plan does not cut
    "model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip


class ContextShards(MeshShape):
    """A mesh whose ranks along `cp` hold shards too, as in torchtitan, FSDP and Megatron's distributed optimizer: each of them
    shards over all ranks that have one part of the layers. graphpp's ranks along `cp` have copies."""

    @property
    def shards(self) -> int:
        return super().shards * self.cp

    @property
    def shard_stride(self) -> int:
        return self.stride("cp")

    @property
    def copies(self) -> tuple[str, ...]:
        return ("dp_replicate",)

    @property
    def copies_of_experts(self) -> tuple[str, ...]:
        return ("dp_replicate",) if self.folded else ("dp_replicate", "cp")


@dataclass(frozen=True)
class Case:
    """A run with one number of stages a rank, as the planner prices it; `usual`: its kernels and overlapped exchanges."""

    run: Run
    machines: Machines
    setting: PlanSetting
    usual: Deployment

    @property
    def float8(self) -> str | None:
        precision = self.run.settings.precision
        return None if precision == "bfloat16" else precision.removeprefix("float8 ")


def cases(run: Run) -> tuple[Case, ...]:
    """A case for each number of stages a rank that the run may have had, and for each kind of kernels.

    FSDP without a pipeline gathers each layer for each forward and backward (`keep=0`), and hybrid sharding small stages, of
    which two are whole. Small stages also hide the reductions that a system hides under the layers of one rank. Raises
    `ValueError` for a run with `cannot`.
    """
    if run.cannot is not None:
        raise ValueError(f"{run.name}: the planner cannot express {run.cannot}")
    it, shape = run.settings, _shape(run.settings)
    keep = 0 if it.zero == 3 and it.pp == 1 and shape.shards > 1 else None
    stages = it.stages
    if it.pp == 1 and (it.shard or (keep is None and "gradients" in it.overlap)):
        stages, keep = (min(SMALL_STAGES, run.architecture.layers),), 2 if keep == 0 else None
    recompute = None if it.recompute == "none" else it.recompute
    chosen = run.architecture.per_token or None if it.dispatch == "machines" else None
    overlapped = tuple(each for each in it.overlap if each in ("tp", "ep"))
    microbatches = it.batch // (shape.data_ranks * it.rows)
    compiled = {"eager": (False,), "partly": (False, True)}.get(it.kernels, (True,))
    return tuple(
        Case(
            run, _machines(run.machines, it.attention),
            PlanSetting(shape, it.rows, microbatches, _schedule(it.schedule, each), keep, recompute),
            Deployment(
                sequence=it.sequence_parallel is not False, compiled=kind, overlapped=overlapped, chosen=chosen,
                casts=it.casts, reduce_dtype=it.reduce_dtype, in_place=it.zero == 1, single=it.experts == "single",
                sum_order="any",
            ),
        )
        for each in stages
        for kind in compiled
    )  # fmt: skip


def _machines(fleet: Fleet, attention: str) -> Machines:
    device = KNOWN[fleet.device]
    if (key := (fleet.device[0], attention)) in KERNELS:
        on, back = KERNELS[key]
        device = replace(device, efficiency=replace(device.efficiency, attention=on, attention_backward=back))
    device = device if fleet.power is None else device.limited(fleet.power)
    between = device.between if fleet.network is None else replace(device.between, bandwidth=fleet.network / 8 * 1e9)
    return Machines(device, fleet.gpus, fleet.per_machine, between=between)


def _shape(it: Settings) -> MeshShape:
    """Whatever ZeRO shards, the planner's weights are sharded too: between steps, or between layers with `keep=0`. Experts that
    `etp` leaves whole are spread over `cp` and `tp` too. Raises `ValueError` for another `etp`, which cannot be priced."""
    shard, inside = 1 if it.zero == 0 else (it.shard or it.dp), it.cp * it.tp
    folded = it.etp == 1 and inside > 1
    if it.etp not in (None, 1, it.tp) or (folded and it.ep % inside):
        raise ValueError(f"ep {it.ep}, etp {it.etp}: the planner has experts that tp divides, or whole ones over cp x tp")
    ep = it.ep // inside if folded else it.ep
    sharded = max(1, shard // ep)
    kind = ContextShards if shard == it.dp and it.zero else MeshShape
    return kind(it.pp, it.dp // (sharded * ep), sharded, ep, it.cp, it.tp, folded)


def _schedule(name: str, stages: int) -> ScheduleChoice:
    if name == "interleaved":
        name = "Interleaved1F1B" if stages > 1 else "1F1B"
    return ScheduleChoice("auto" if name == "loop" else name, stages)


def _causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention without a mask; narrower values are padded to the width of the keys, as for a fused kernel."""
    more, grouped = key.shape[-1] - value.shape[-1], query.shape[1] != key.shape[1]
    wide = F.pad(value, (0, more)) if more else value
    found = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=options["scaling"], enable_gqa=grouped)
    return found[..., : value.shape[-1]].transpose(1, 2), None


def _repeated(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """As `_causal`, with a copy of each key and value for every query head, before kernels knew of grouped queries."""
    copies = query.shape[1] // key.shape[1]
    return _causal(module, query, *(each.repeat_interleave(copies, 1) for each in (key, value)), mask, **options)


def _unfused(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention as two products around a softmax, with all scores in memory."""
    rows = torch.arange(query.shape[-2], device=query.device)
    scores = (query @ key.transpose(-1, -2) * options["scaling"]).masked_fill(rows[:, None] < rows, float("-inf"))
    shares = F.dropout(scores.softmax(-1), options["dropout"], training=options["dropout"] > 0)
    return (shares @ value).transpose(1, 2), None


def _attention(name: str) -> Callable[..., tuple[Tensor, None]]:
    return {"newest": _causal, "unfused": _unfused}.get(name, _repeated)


def config(model: Model, length: int, *, attention: str = "newest", dropout: float = 0.0) -> Any:
    """The transformers config. A "gpt" is a Starcoder 2: its positions are rotated, not learned; its other parts are GPT's."""
    own: dict[str, Any] = {"sliding_window": None} if model.family in ("gpt", "mixtral") else {}
    if model.family == "deepseek_v3" and model.latent is not None:
        it = model.latent
        own |= {
            "q_lora_rank": it.queries, "kv_lora_rank": it.keys, "qk_nope_head_dim": it.plain, "qk_rope_head_dim": it.rotary,
            "v_head_dim": it.values, "first_k_dense_replace": model.dense, "n_shared_experts": model.shared,
            "n_routed_experts": model.experts, "moe_intermediate_size": model.expert_ffn,
        }  # fmt: skip
    elif model.family == "qwen3_moe":
        own |= {"num_experts": model.experts, "moe_intermediate_size": model.expert_ffn, "head_dim": model.head}
    elif model.family == "mixtral":
        own |= {"num_local_experts": model.experts}
    elif model.family == "qwen3":
        own |= {"head_dim": model.head}
    if model.family == "gpt":
        own |= dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), dropout)
    own |= {"num_experts_per_tok": model.per_token} if model.experts else {}
    made: Any = CONFIGS[model.family](
        use_cache=False, max_position_embeddings=length, hidden_size=model.hidden, intermediate_size=model.ffn,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        vocab_size=model.vocabulary, tie_word_embeddings=model.tied, **own,
    )  # fmt: skip
    if model.experts:
        made._experts_implementation = "grouped_mm"
    made._attn_implementation = _attention(attention).__name__
    return made


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


@cache
def costs(
    model: Model, length: int, float8: str | None, *, attention: str = "newest", dropout: float = 0.0, single: bool = False
) -> ModelCosts:
    """The costs of a model for rows of `length` tokens. `single`: each expert's rows in float8 are scaled by kernels of their
    own."""
    kernel = _attention(attention)
    transformers.AttentionInterface.register(kernel.__name__, kernel)
    transformers.AttentionMaskInterface.register(kernel.__name__, lambda *args, **options: None)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config(model, length, attention=attention, dropout=dropout))
        tokens = torch.empty(1, length, dtype=torch.int64)
    plan = {**made.tp_plan, **LATENT} if model.latent is not None else None
    example = graphpp.Microbatch((), {"input_ids": tokens}, tokens)
    found = capture_costs(made, loss, example, tensor_plan=plan, float8=float8)
    return found if float8 is None else _experts_in_float8(found, _PASSES[float8], model.experts if single else 0)


_PASSES = {"tensorwise": 6, "rowwise": 4}  # bytes an element: reads for the scale and the cast, or for both; two orders written


_SCALING = (0, 2, 0, 4)
"""Bytes an element of the kernels by which Transformer Engine 2.7 and 2.9 scale a tensor: they zero its maximum, find it, make
the scale, and cast in two orders (`Float8CurrentScalingQuantizer::quantize_impl`). Each expert has its own, since only delayed
scaling has a kernel for several tensors (`multi_tensor_quantize_impl`)."""


def _experts_in_float8(costs: ModelCosts, passes: int, single: int = 0) -> ModelCosts:
    """Experts in float8, too, which torchao's conversion leaves out: each product has the passes that scale its rows.
    Weights are scaled once per step, and a product for the gradient of weights has operands that are scaled already. `single`:
    the number of experts whose rows are scaled by kernels of their own (0: by one for all)."""
    pieces = ((0, 0, 1, float(single)),) if single else ()

    def scaled(one: Operation) -> list[Operation]:
        left, right = one.sides[0], one.sides[1][0]
        if not any(term[0] for term in left):
            return []
        each = tuple((r - right[0], s - right[1], e - right[2], work / 2 / right[3]) for r, s, e, work in one.flops)
        kernels = [tuple((*powers, width * elements) for *powers, elements in each) for width in _SCALING if single]
        kernels = kernels or [tuple((*powers, passes * elements) for *powers, elements in each)]
        return [Operation("memory", nbytes=size, pieces=pieces) for size in kernels]

    def changed(kind: SegmentKind) -> SegmentKind:
        phases = [list(phase) for phase in kind.operations]
        for phase in phases:
            grouped = [(one, n) for one, n in phase if one.grouped]
            phase[:] = [(replace(one, dtype="float8_e4m3fn") if one.grouped else one, n) for one, n in phase]
            phase += [(each, n) for one, n in grouped for each in scaled(one)]
        return replace(kind, operations=tuple(map(tuple, phases)))

    variants = {name: replace(each, kinds=tuple(map(changed, each.kinds))) for name, each in costs.variants.items()}
    parameters = tuple(replace(each, float8=each.float8 or each.expert) for each in costs.parameters)
    return replace(costs, variants=variants, parameters=parameters)


def saved_by_fused_kernels(costs: ModelCosts) -> ModelCosts:
    """A model whose products save their inputs, as `Linear` and `LayerNormLinear` of Transformer Engine do: the quantized ones
    where they compute in float8. Norms and activations save their inputs alone, as with a compiler."""

    def changed(kind: SegmentKind) -> SegmentKind:
        width = 0.5 if any(one.dtype.startswith("float8") for one, _ in kind.operations[0]) else 1.0
        more = tuple((*powers, width * amount) for *powers, amount in kind.operands)
        return replace(kind, saved=summed([kind.saved, more]))

    plain = costs.variants[None]
    return replace(costs, variants={**costs.variants, None: replace(plain, kinds=tuple(map(changed, plain.kinds)))})


def with_fused_loss(costs: ModelCosts) -> ModelCosts:
    """A model whose last segment has logits and their gradients in the dtype of the model alone: a compiled loss, or that of
    Transformer Engine, makes no copy in float32."""
    last = len(costs.starts) - 1

    def changed(own: Variant) -> Variant:
        kinds = (*own.kinds, _without_copies(own.kinds[own.kind_of[last]]))
        return Variant(kinds, (*own.kind_of[:last], len(own.kinds)))

    return replace(costs, variants={name: changed(own) for name, own in costs.variants.items()})


_LOGITS = (2, 4, 4, 2)  # bytes of a logit that are live in each phase: itself, its gradient, or both


def _without_copies(kind: SegmentKind) -> SegmentKind:
    head = max((one for one, _ in kind.operations[0] if one.sides), key=lambda one: sum(term[3] for term in one.flops))
    logits = 2 * head.sides[0][0][3] * head.sides[1][0][3]

    def limited(size: Size, most: int) -> Size:
        """The size with at most so many bytes of each logit: what is left of whole copies is of other values."""
        own = ((*powers, amount - max(0.0, amount // logits - most / 2) * logits) for *powers, amount in size)
        return tuple(new if new[0] else old for new, old in zip(own, size, strict=True))

    peaks = (tuple(limited(size, most) for size in sizes) for sizes, most in zip(kind.peaks, _LOGITS, strict=True))
    return replace(kind, peaks=tuple(peaks), saved=limited(kind.saved, _LOGITS[0]))


@dataclass(frozen=True)
class Compared:
    """A run beside the prediction of one of its cases; `seconds`: of its step, by part."""

    run: Run
    seconds: StepSeconds
    peak: int

    @property
    def rate(self) -> float:
        """Predicted tokens per second and GPU."""
        return self.run.settings.batch * self.run.settings.length / self.seconds.total / self.run.machines.gpus

    @property
    def error(self) -> float:
        return self.rate / (self.run.tokens or self.rate) - 1

    @property
    def per_peak(self) -> float:
        """Utilisation of one token per second."""
        it = self.run
        return it.architecture.flops(it.settings.length, "causal") / DEVICES[it.machines.device]

    @property
    def nbytes(self) -> float | None:
        """Predicted bytes over the published ones; None if none were published."""
        published = self.run.result.memory
        return published and self.peak / (published * (2**30 if self.run.result.unit == "GiB" else 1e9))

    def row(self) -> tuple[str, ...]:
        it, total = self.run, self.seconds.total
        shares = [self.seconds.collectives, self.seconds.bubble, self.seconds.gradients]
        return (
            it.name, f"{it.tokens:,.0f}" if it.tokens else "", f"{self.rate:,.0f}", f"{self.error:+.0%}" if it.tokens else "",
            *(f"{share / total:.0%}" for share in shares), f"{self.nbytes - 1:+.0%}" if self.nbytes else "",
            f"{it.source.title}, {it.table}",
        )  # fmt: skip


def compared(run: Run, known: Callable[..., ModelCosts] = costs) -> Compared:
    """The run beside its fastest case; of kernels that are fused in part, beside the mean of both kinds."""
    it, found = run.settings, dict[bool, list[Prediction]]()
    for case in cases(run):
        single = it.experts == "single" and case.float8 is not None
        own = known(run.architecture, it.length, case.float8, attention=it.attention, dropout=it.dropout, single=single)
        own = saved_by_fused_kernels(own) if it.kernels == "fused" else own
        own = with_fused_loss(own) if it.loss == "fused" else own
        request = PlanRequest(own, case.machines, it.batch, it.length, "bfloat16", case.usual)
        priced = predict(request, case.setting)
        if priced is None:
            raise ValueError(f"{run.name}: {case.setting.schedule} has no table for {case.setting.microbatches} microbatches")
        found.setdefault(case.usual.compiled, []).append(priced)
    best = [min(each, key=lambda one: one.seconds.total) for each in found.values()]
    parts = {part.name: mean(getattr(one.seconds, part.name) for one in best) for part in fields(StepSeconds)}
    return Compared(run, StepSeconds(**parts), max(one.peak for one in best))


def chosen(groups: Sequence[str] | None, names: Sequence[str] | None) -> list[Run]:
    """The runs of some groups whose names have one of the parts; without either, the documented runs."""
    runs = read_runs()
    if unknown := set(groups or ()) - {run.group for run in runs}:
        raise SystemExit(f"--group: {sorted(unknown)}; groups are {sorted({run.group for run in runs})}")
    if groups is not None or names:
        runs = tuple(run for run in runs if not groups or run.group in groups)
        return [run for run in runs if not names or any(part in run.name for part in names)]
    return [run for run in runs if run.documented]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of the names of runs")
    parser.add_argument("--group", nargs="*", help="names of files of benchmarks/published; none: all")
    option = parser.parse_args()
    runs, console, progress = chosen(option.group, option.only), Console(width=240), Console(stderr=True)
    table = Table("run", "published", "predicted", "difference", "collectives", "idle", "gradients", "bytes", "source")
    found = []
    for run in runs:
        if run.cannot is None:
            found.append(compared(run))
            table.add_row(*found[-1].row())
            progress.print(f"{run.name}: {found[-1].error:+.0%}")
    console.print(table)
    for run in runs:
        if run.cannot is not None:
            console.print(f"not priced: {run.name}: {run.cannot}")
    if option.group is not None:
        table = Table("group", "runs", "bias", "median", "90 %", "tau", f"tau beyond {NOISE:.0%}")
        for group in sorted({each.run.group for each in found}):
            table.add_row(*summary(group, [each for each in found if each.run.group == group]))
        table.add_row(*summary("all", found))
        console.print(table)
        table = Table("runs that differ in their layout", "number", "predicted to be fastest", "fastest", "slower by")
        for row in choices(found):
            table.add_row(*row)
        console.print(table)
        table = Table("kind", "runs", "published over predicted seconds, 10 to 90 %")
        for row in error_bars(found):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
