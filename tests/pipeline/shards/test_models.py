"""Models of transformers and peft with shards: three steps of AdamW with clipping, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphpp
from graphpp.runtime.shards.local_rows import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.zoo.models import ROWS, ZOO

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 asks a model of transformers 5.23 by the old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

PIPE, HYBRID = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("dp_replicate", "dp_shard"))
STEPS, MICROBATCHES = 3, 4


def pipeline(name: str, **options: Any) -> graphpp.Pipeline:
    entry = ZOO[name]
    batch, rows = entry.batch(0), ROWS // MICROBATCHES
    inputs = {key: value[:rows] if isinstance(value, Tensor) else value for key, value in batch.kwargs.items()}
    target = None if batch.target is None else batch.target[:rows]
    example = graphpp.Microbatch((), inputs, target)
    return graphpp.compile(entry.model(), entry.loss, example=example, microbatches=MICROBATCHES, **options)


def adamw(pipe: graphpp.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)  # above rounding


def on_mesh(rank: int, name: str, mesh: Mesh, stages: int, schedule: str, keep: int | None) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    pipe = pipeline(name, mesh=mesh.made(), split=stages, schedule=schedule, parallel=graphpp.Parallel(keep=keep))
    optimizer = adamw(pipe)
    for number in range(STEPS):
        batch = ZOO[name].batch(10 * number + mesh.replica(rank))
        pipe.step(**batch.kwargs, target=batch.target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()}


def alone(name: str, replicas: int) -> dict[str, Tensor]:
    pipe = pipeline(name)
    optimizer = adamw(pipe)
    for number in range(STEPS):
        for replica in range(replicas):
            batch = ZOO[name].batch(10 * number + replica)
            pipe.step(**batch.kwargs, target=batch.target, accumulation_steps=replicas)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: parameter.detach().clone() for fqn, parameter in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("name", "mesh", "stages", "schedule", "keep"),
    [
        ("llama", PIPE, 2, "1F1B", None),
        *further(
            ("mixtral", PIPE, 4, "Interleaved1F1B", 1),
            ("llama", PIPE, 4, "ZBVZeroBubble", None),
            ("llama", HYBRID, 2, "LoopedBFS", 1),
            ("lora_llama", PIPE, 4, "DualPipeV", 2),
            ("gpt2", PIPE, 2, "GPipe", None),
        ),
    ],
)
def test_a_training_is_that_of_one_process(name: str, mesh: Mesh, stages: int, schedule: str, keep: int | None) -> None:
    expected = alone(name, mesh.replicas)
    for found in run_ranks(on_mesh, mesh.ranks, name, mesh, stages, schedule, keep):
        for fqn, value in found.items():
            assert (value - expected[fqn]).abs().max() <= 1e-5 * max(1.0, float(expected[fqn].abs().max())), fqn
