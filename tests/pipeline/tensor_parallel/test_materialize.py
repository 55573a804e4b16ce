"""Models on the meta device that tp spreads get the values of one process: by code that initialises them, or from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from graphpp.ownership.initialize import reset
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.tensor_parallel import Decoder, batch, compiled, decoder, loss, spread

TENSOR, PIPE, SHARDS = Mesh((2,), ("tp",)), Mesh((2, 2), ("pp", "tp")), Mesh((2, 2), ("dp_shard", "tp"))


def alone(*, tied: bool) -> Decoder:
    """The model that one process initialises."""
    model = decoder(layers=2, tied=tied)
    torch.manual_seed(5)
    model.apply(reset)
    return model


def filled(rank: int, mesh: Mesh, tied: bool, file: Path | None) -> None:
    torch.set_num_threads(1)
    made = mesh.made()
    with torch.device("meta"):
        model = decoder(layers=2, tied=tied)
    pipe = compiled(made, spread(model, made["tp"], sequence=True), split=["layers.1"], schedule="1F1B")
    torch.manual_seed(5)
    pipe.materialize(weights=file) if file is not None else pipe.materialize()
    expected = alone(tied=tied)
    wanted = expected.state_dict()
    for key, value in pipe.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(whole_tensor(value), wanted[key])
    tokens, target = batch(0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found = [pipe.step(tokens, target=target).loss]
    optimizer.step()
    found.append(pipe.step(tokens, target=target).loss)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for each in found:
        value = loss(expected(tokens), target)
        torch.testing.assert_close(each, value.detach(), rtol=1e-5, atol=1e-6)
        value.backward()
        theirs.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "tied"), [(TENSOR, False), *further((SHARDS, False), (PIPE, True), (PIPE, False))])
def test_code_gives_the_values_of_one_process(mesh: Mesh, tied: bool) -> None:
    run_ranks(filled, mesh.ranks, mesh, tied, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh",), [(PIPE,), *further((TENSOR,), (SHARDS,))])
def test_files_give_their_values(mesh: Mesh, tmp_path: Path) -> None:
    save_file(dict(alone(tied=False).state_dict()), tmp_path / "model.safetensors")
    run_ranks(filled, mesh.ranks, mesh, False, tmp_path / "model.safetensors")
