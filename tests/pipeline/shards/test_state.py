"""What a rank holds of a sharded model: state dicts, weights in files, checkpoints that other meshes load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh, batch, check_state_dicts, compiled, example, odd
from tests.special_models import CUTS

ONE, SHARD2, SHARD3 = Mesh((), ()), Mesh((2,), ("dp_shard",)), Mesh((3,), ("dp_shard",))
PIPE, HYBRID = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("dp_replicate", "dp_shard"))


def pipeline(mesh: Mesh, **options: Any) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    stages = 2 if "pp" in mesh.names else 1
    made = mesh.made() if mesh.names else None
    return compiled(made, odd(tied=True), split=CUTS[stages], example=example(), **options)


def states(rank: int, mesh: Mesh, folder: Path) -> None:
    pipe, whole = pipeline(mesh), odd(tied=True).state_dict()
    weight = dict(pipe.named_parameters()).get("embed.weight")
    if weight is not None:
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(0),)
        assert weight.to_local().shape == torch.chunk(whole["embed.weight"], 2)[rank % 2].shape
    check_state_dicts(pipe, whole, folder)
    with pytest.raises(graphpp.GraphPPError, match=r"instead of \[13, 7\]"):
        pipe.load_state_dict(whole | {"embed.weight": torch.zeros(2, 2), "head.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize(("mesh",), [(SHARD2,), *further((PIPE,), (HYBRID,))])
def test_state_dicts_and_files_have_the_whole_values(mesh: Mesh, tmp_path: Path) -> None:
    run_ranks(states, mesh.ranks, mesh, tmp_path)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == mesh.size("pp")


def adamw(pipe: graphpp.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(pipe.parameters()), lr=1e-2)


def steps(pipe: graphpp.Pipeline, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:  # all replicas have one batch: averages of 2 and 4 equal gradients are exact
        tokens, target = batch(number)
        pipe.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()


def whole_values(pipe: graphpp.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {key: whole_tensor(value).clone() for key, value in pipe.state_dict().items()}
    for fqn, parameter in pipe.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"{fqn} {name}": whole_tensor(value).clone() for name, value in state.items()}
    return found


def saved(rank: int, mesh: Mesh, folder: Path, how: str) -> dict[str, Tensor]:
    pipe = pipeline(mesh)
    optimizer = adamw(pipe)
    steps(pipe, optimizer, range(2))
    checkpoint = pipe.checkpoint(optimizer)
    if how == "save":
        checkpoint.save(folder / "run")
    elif how == "async":
        pending = checkpoint.async_save(folder / "run")
        before = whole_values(pipe, optimizer)
        steps(pipe, optimizer, range(2, 3))  # changes what is being written
        pending.wait()
        return before
    else:
        checkpoint.local(folder / "local").save()
    return whole_values(pipe, optimizer)


def resumed(rank: int, mesh: Mesh, folder: Path, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pipe = pipeline(mesh)
    optimizer = adamw(pipe)
    checkpoint = pipe.checkpoint(optimizer)
    checkpoint.local(folder / "local").load() if how == "local" else checkpoint.load(folder / "run")
    loaded = whole_values(pipe, optimizer)
    steps(pipe, optimizer, range(2, 4))
    return loaded, whole_values(pipe, optimizer)


def undisturbed(rank: int) -> dict[str, Tensor]:
    pipe = pipeline(ONE)
    optimizer = adamw(pipe)
    steps(pipe, optimizer, range(4))
    return whole_values(pipe, optimizer)


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (SHARD2, ONE, "save"),
        *further((PIPE, HYBRID, "local"), (PIPE, SHARD3, "async"), (ONE, SHARD3, "save"), (HYBRID, PIPE, "save")),
    ],
)
def test_any_mesh_goes_on_with_the_checkpoint_of_another(before: Mesh, after: Mesh, how: str, tmp_path: Path) -> None:
    was = joined(run_ranks(saved, before.ranks, before, tmp_path, how))
    ranks = run_ranks(resumed, after.ranks, after, tmp_path, how)
    for loaded, later in ranks:
        assert all(torch.equal(value, was[name]) for name, value in loaded.items())
        assert later.keys() == loaded.keys()
    if after.replicas != 3 and "pp" not in (*before.names, *after.names):
        expected = run_ranks(undisturbed, 1)[0]
        for _, later in ranks:
            assert all(torch.equal(value, expected[name]) for name, value in later.items())


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def on_meta(rank: int, mesh: Mesh) -> None:
    """A model without memory gets its values, bit-equal to those of one process, and is sharded then."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = type(odd())(tied=True)
    pipe = compiled(mesh.made(), model, split=CUTS[2 if "pp" in mesh.names else 1], example=example())
    expected = odd(tied=True)
    torch.manual_seed(5)
    pipe.materialize(init)
    torch.manual_seed(5)
    expected.apply(init)
    for key, value in pipe.state_dict().items():
        assert torch.equal(whole_tensor(value), expected.state_dict()[key]), key
    assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
    steps(pipe, adamw(pipe), range(1))
    with pytest.raises(graphpp.GraphPPError, match="each rank holds its shards"):
        pipe.materialize(init)


def init(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.uniform_(parameter)
    for name, buffer in module.named_buffers(recurse=False):
        buffer.fill_(1 if "var" in name else 0)


@pytest.mark.parametrize(("mesh",), [(SHARD2,), *further((PIPE,))])
def test_a_model_without_memory_is_sharded_when_it_has_values(mesh: Mesh) -> None:
    run_ranks(on_meta, mesh.ranks, mesh)
