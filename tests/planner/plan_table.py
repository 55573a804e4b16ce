"""The table of docs/meshes/what_to_write.md: each line is the plan of a whole model on a whole mesh, made in one process.

Contract: `plan(line)` compiles the model on the meta device, as rank 0 of torch's process group "fake", whose collectives send
nothing and whose other ranks are not there. Nothing runs. `row(line)` is the line of the table, and all its bytes are those of
the plan. A model is captured once for all its lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.planner.memory_plan import RankMemory
from graphpp.planner.plan import Plan
from tests import internals

TOKENS = 4096  # of a row; a microbatch has one row
CAP = 80 * 2**30
HEAD = "| GPUs | model | `mesh=` | stages | schedule | microbatches | keep | recompute | sums | tokens a step | a rank holds |"
_CAUSAL = "causal_without_mask"


@dataclass(frozen=True)
class Line:
    """A machine and a model, and what to write for them. `stages`: how many; None: each layer is one, and what is beside them.

    `sums`: the dtype in which gradients add up over the microbatches.
    """

    model: str
    mesh: dict[str, int]
    stages: int | None
    schedule: str
    microbatches: int
    keep: int | None = None
    recompute: str | None = None
    sums: torch.dtype = torch.float32

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())

    @property
    def tokens(self) -> int:
        """The tokens of a step, of all replicas."""
        replicas = prod(size for name, size in self.mesh.items() if name.startswith("dp"))
        return replicas * self.microbatches * TOKENS


def _causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention that makes no mask; narrower values are padded to the width of the keys, as for a fused kernel."""
    more, grouped = key.shape[-1] - value.shape[-1], query.shape[1] != key.shape[1]
    wide = F.pad(value, (0, more)) if more else value
    found = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=options["scaling"], enable_gqa=grouped)
    return found[..., : value.shape[-1]].transpose(1, 2), None


@contextmanager
def _registered() -> Iterator[None]:
    """While open, transformers knows the attention; later captures of its models are not to find code of a test there."""
    with (
        mock.patch.dict(transformers.AttentionInterface._global_mapping, {_CAUSAL: _causal}),
        mock.patch.dict(transformers.AttentionMaskInterface._global_mapping, {_CAUSAL: lambda *args, **options: None}),
    ):
        yield


def config(model: str) -> Any:
    """The sizes of Llama 2 (7B), Llama 3 (70B) and DeepSeek V3 (671B); of the others some small ones."""
    made: Any
    if model == "671B":
        made = transformers.DeepseekV3Config(use_cache=False)
        made._experts_implementation = "grouped_mm"
    else:
        sizes: dict[str, dict[str, int]] = {
            "small": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
            "7B": {},
            "70B": {
                "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8, "vocab_size": 128256,
            },
        }  # fmt: skip
        made = transformers.LlamaConfig(use_cache=False, max_position_embeddings=TOKENS, **sizes[model])  # type: ignore[arg-type]
    made._attn_implementation = _CAUSAL
    return made


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """While open, this process is rank 0 of `count` ranks, of which there are no others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


_captured: dict[str, Any] = {}


def _captured_once(model: str) -> Any:
    def capture(*args: Any, **options: Any) -> Any:
        if model not in _captured:
            _captured[model] = internals.capture(*args, **options)
        return deepcopy(_captured[model])

    return internals.capturing_by(capture)


@_registered()
def compiled_plan(line: Line) -> Plan:
    """The plan of this rank's process group."""
    mesh = init_device_mesh("cpu", tuple(line.mesh.values()), mesh_dim_names=tuple(line.mesh))
    chosen = config(line.model)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(chosen)
    tokens = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    layers = [f"model.layers.{index}" for index in range(chosen.num_hidden_layers)]
    pipe = graphpp.compile(
        model, loss, example=graphpp.Microbatch((), {"input_ids": tokens}, tokens), mesh=mesh,
        split=line.stages if line.stages is not None else [*layers, "model.norm", "lm_head"],
        schedule=line.schedule, microbatches=line.microbatches, memory=line.recompute,
        parallel=graphpp.Parallel(keep=line.keep, param_dtype=torch.bfloat16), gradients=graphpp.Gradients(dtype=line.sums),
    )  # fmt: skip
    return pipe.plan


def plan(line: Line) -> Plan:
    with fake_ranks(line.ranks), _captured_once(line.model):
        return compiled_plan(line)


def fullest(found: Plan) -> RankMemory:
    """The rank that holds most."""
    assert found.memory is not None
    return max(found.memory.ranks, key=lambda each: each.peak)


def row(line: Line) -> str:
    """The line of the table."""
    found = plan(line)
    most = fullest(found)
    held = f"{_gib(most.peak)}, of which shards and optimizer {_gib(most.shards + most.optimizer)}"
    fits = held if most.peak <= CAP else f"does not fit: {held}"
    mesh = ", ".join(f"{name} {size}" for name, size in line.mesh.items())
    sums = str(line.sums).removeprefix("torch.")
    keep, recompute = ("all" if line.keep is None else line.keep), (line.recompute or "none")
    settings = (mesh, len(found.stages), line.schedule, line.microbatches, keep, recompute, sums, f"{line.tokens:,}", fits)
    return "| " + " | ".join(map(str, (line.ranks, line.model, *settings))) + " |"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


LINES = (
    Line("7B", {"dp_shard": 8}, 8, "auto", 4),
    Line("70B", {"dp_shard": 8}, None, "LoopedBFS", 4, 1, "full", torch.bfloat16),
    Line("671B", {"dp_shard": 8}, None, "LoopedBFS", 4, 1, "full", torch.bfloat16),
    Line("7B", {"dp_replicate": 8, "dp_shard": 8}, 8, "auto", 4),
    Line("70B", {"pp": 4, "dp_shard": 16}, 80, "LoopedBFS", 8, 2, "full"),
    Line("671B", {"pp": 16, "dp_shard": 4}, None, "LoopedBFS", 16, 1, "full", torch.bfloat16),
    Line("7B", {"dp_replicate": 128, "dp_shard": 8}, 8, "auto", 1),
    Line("70B", {"pp": 8, "dp_replicate": 16, "dp_shard": 8}, 40, "Interleaved1F1B", 8, None, "full"),
    Line("671B", {"pp": 64, "dp_shard": 16}, None, "1F1B", 64, 1, "full", torch.bfloat16),
)
