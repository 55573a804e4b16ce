"""What a rank holds of a model that tp spreads: state dicts, weights in files, checkpoints that other meshes load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh, check_resume, check_state_dicts, resumed
from tests.tensor_parallel import batch, compiled, decoder, spread

ONE, TENSOR, PIPE = Mesh((), ()), Mesh((2,), ("tp",)), Mesh((2, 2), ("pp", "tp"))
SHARDS, REPLICAS = Mesh((2, 2), ("dp_shard", "tp")), Mesh((2, 2), ("dp_replicate", "tp"))


def pipeline(mesh: Mesh) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    made = mesh.made() if mesh.names else None
    model = decoder(layers=2, tied=True)
    if made is not None:
        spread(model, made["tp"], sequence=True)
    return compiled(made, model, split=["layers.1"], schedule="1F1B")


def states(rank: int, mesh: Mesh, folder: Path) -> None:
    pipe = pipeline(mesh)
    own = pipe.state_dict()
    assert all(isinstance(value, DTensor) for key, value in own.items() if "norm" not in key or "layers" in key)
    check_state_dicts(pipe, decoder(layers=2, tied=True).state_dict(), folder)


@pytest.mark.parametrize(("mesh",), [(TENSOR,), *further((SHARDS,), (PIPE,), (REPLICAS,))])
def test_state_dicts_and_files_have_the_whole_values(mesh: Mesh, tmp_path: Path) -> None:
    run_ranks(states, mesh.ranks, mesh, tmp_path)


def trained(rank: int, mesh: Mesh, folder: Path, saves: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters in a checkpoint, which this mesh saves after two steps or another one has saved; and a step after it."""
    pipe = pipeline(mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, eps=1e-5)  # above the rounding of gradients
    checkpoint = pipe.checkpoint(optimizer)

    def step(number: int) -> None:
        tokens, target = batch(number)
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return resumed(pipe, checkpoint, folder, step, saves=saves)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (SHARDS, TENSOR),
        *further((PIPE, ONE), (ONE, SHARDS), (TENSOR, PIPE), (PIPE, SHARDS), (REPLICAS, TENSOR), (TENSOR, REPLICAS)),
    ],
)
def test_a_checkpoint_fits_every_mesh(saves: Mesh, loads: Mesh, tmp_path: Path) -> None:
    check_resume(trained, saves, loads, tmp_path, rtol=1e-3, atol=1e-4)
