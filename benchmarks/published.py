"""Compare predicted tokens per second and GPU with published measurements, in the published settings.

    python benchmarks/published.py [--only NAME ...]

Nothing runs on a GPU: each model is captured on the meta device (minutes for all), and its published layout is priced by
`graphpp.plan(like=, search=False)`, with whole stages kept and nothing searched for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

import graphpp
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts, SegmentKind
from graphpp.cluster_planner.costs.operations import Operation
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.devices import A100, H100_SXM, Machines

H100_HBM2E = replace(H100_SXM, name="H100 96 GB", memory_bandwidth=2.4e12, memory=96 * 10**9)  # of torchtitan's machines
H800 = replace(H100_SXM, name="H800", inside=replace(H100_SXM.inside, bandwidth=200e9))  # NVLink with 400 GB/s both ways
LATENT = {  # multi-head latent attention, which transformers' own plan does not cut
    "model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A published run. `published`: tokens per second and GPU; `model`, `length`: of `config`; `source`: where it stands."""

    name: str
    source: str
    model: str
    length: int
    machines: Machines
    shape: MeshShape
    schedule: ScheduleChoice
    batch: int
    rows: int
    recompute: str | None
    published: float
    float8: str | None = None


_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_OLDER = "torchtitan, docs/performance.md of 2024-07"
LOOP, PLAIN, TWO = ScheduleChoice("auto"), ScheduleChoice("1F1B"), ScheduleChoice("Interleaved1F1B", 2)
_8B: dict[str, Any] = {"model": "8B", "length": 8192, "schedule": LOOP, "recompute": "selective"}
_70B: dict[str, Any] = {"model": "70B", "length": 8192, "schedule": LOOP, "recompute": "full"}
_405B: dict[str, Any] = {
    "source": _TITAN, "model": "405B", "length": 8192, "machines": Machines(H100_HBM2E, 512),
    "shape": MeshShape(pp=8, dp_shard=8, tp=8), "batch": 256, "rows": 1, "recompute": "full", "float8": "tensorwise",
}  # fmt: skip
CASES = (
    Case(
        "Llama 3 8B, 8 H100", _TITAN, machines=Machines(H100_HBM2E, 8), shape=MeshShape(dp_shard=8), batch=16, rows=2,
        published=6667, **_8B,
    ),
    Case(
        "Llama 3 8B, 128 H100", _TITAN, machines=Machines(H100_HBM2E, 128), shape=MeshShape(dp_shard=128), batch=256, rows=2,
        published=6514, **_8B,
    ),
    Case(
        "Llama 3 8B, 64 A100", _OLDER, machines=Machines(A100, 64), shape=MeshShape(dp_shard=64), batch=64, rows=1,
        published=2973, **_8B,
    ),
    Case(
        "Llama 3 70B, 64 A100", _OLDER, machines=Machines(A100, 64), shape=MeshShape(dp_shard=64), batch=64, rows=1,
        published=331, **_70B,
    ),
    Case(
        "Llama 2 13B, 64 A100", _OLDER, "13B", 4096, Machines(A100, 64), MeshShape(dp_shard=64), LOOP, batch=128, rows=2,
        recompute=None, published=2162,
    ),
    Case(
        "Llama 3 70B, 256 H100, tp 8, float8", _TITAN, machines=Machines(H100_HBM2E, 256), shape=MeshShape(dp_shard=32, tp=8),
        batch=512, rows=16, float8="tensorwise", published=829, **_70B,
    ),
    Case("Llama 3 405B, 512 H100, 1F1B, float8", schedule=PLAIN, published=100, **_405B),
    Case("Llama 3 405B, 512 H100, Interleaved1F1B, float8", schedule=TWO, published=128, **_405B),
    Case(
        "DeepSeek-V3, 2048 H800, DualPipe, float8", "arXiv 2412.19437, 180,000 GPU hours for 1e12 tokens", "671B", 4096,
        Machines(H800, 2048), MeshShape(pp=16, dp_shard=2, ep=64), ScheduleChoice("DualPipeV", 2), batch=15360, rows=1,
        recompute=None, float8="rowwise", published=1543,
    ),
)  # fmt: skip


def _causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention without a mask; narrower values are padded to the width of the keys, as for a fused kernel."""
    more, grouped = key.shape[-1] - value.shape[-1], query.shape[1] != key.shape[1]
    wide = F.pad(value, (0, more)) if more else value
    found = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=options["scaling"], enable_gqa=grouped)
    return found[..., : value.shape[-1]].transpose(1, 2), None


def config(model: str, length: int) -> Any:
    if model == "671B":
        made: Any = transformers.DeepseekV3Config(use_cache=False)
        made._experts_implementation = "grouped_mm"
    else:
        width, inner, layers, heads, shared, vocabulary = {
            "8B": (4096, 14336, 32, 32, 8, 128256), "13B": (5120, 13824, 40, 40, 40, 32000),
            "70B": (8192, 28672, 80, 64, 8, 128256), "405B": (16384, 53248, 126, 128, 8, 128256),
        }[model]  # fmt: skip
        made = transformers.LlamaConfig(
            use_cache=False, max_position_embeddings=length, hidden_size=width, intermediate_size=inner,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=shared, vocab_size=vocabulary,
        )  # fmt: skip
    made._attn_implementation = "causal_without_mask"
    return made


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


@cache
def costs(model: str, length: int, float8: str | None) -> ModelCosts:
    """The costs of a model by its size, for rows of `length` tokens."""
    transformers.AttentionInterface.register("causal_without_mask", _causal)
    transformers.AttentionMaskInterface.register("causal_without_mask", lambda *args, **options: None)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config(model, length))
        tokens = torch.empty(1, length, dtype=torch.int64)
    plan = {**made.tp_plan, **LATENT} if model == "671B" else None
    example = graphpp.Microbatch((), {"input_ids": tokens}, tokens)
    found = capture_costs(made, loss, example, tensor_plan=plan, float8=float8)
    return _experts_in_float8(found) if float8 is not None else found


def _experts_in_float8(costs: ModelCosts) -> ModelCosts:
    """Products of experts in float8, too, without their scaling passes: torchao's conversion has linear layers alone."""

    def changed(kind: SegmentKind) -> SegmentKind:
        in_float8: Callable[[Operation], Operation] = lambda one: replace(one, dtype="float8_e4m3fn") if one.grouped else one  # noqa: E731
        return replace(kind, operations=tuple(tuple((in_float8(one), n) for one, n in phase) for phase in kind.operations))

    variants = {name: replace(each, kinds=tuple(map(changed, each.kinds))) for name, each in costs.variants.items()}
    return replace(costs, variants=variants)


def record(case: Case) -> tuple[str, ...]:
    microbatches = case.batch // (case.shape.data_ranks * case.rows)
    layout = PlanSetting(case.shape, case.rows, microbatches, case.schedule, None, case.recompute)
    known = costs(case.model, case.length, case.float8)
    found = graphpp.plan(known, machines=case.machines, batch=case.batch, like=layout, search=False).best
    predicted = found.tokens_per_second / case.machines.gpus
    seconds, total = found.seconds, found.step_seconds
    shares = [seconds.collectives, seconds.bubble, seconds.gradients]
    return (
        case.name, f"{case.published:,.0f}", f"{predicted:,.0f}", f"{predicted / case.published - 1:+.0%}",
        *(f"{share / total:.0%}" for share in shares), f"{found.peak / 2**30:.0f} GiB", case.source,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of the names of cases")
    option = parser.parse_args()
    chosen: Callable[[Case], bool] = lambda case: not option.only or any(part in case.name for part in option.only)  # noqa: E731
    table = Table("run", "published", "predicted", "difference", "collectives", "idle", "gradients", "bytes", "source")
    for case in filter(chosen, CASES):
        table.add_row(*record(case))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
