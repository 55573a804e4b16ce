"""A model on the meta device gets shards with the values of one process, and never holds a whole stage."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphpp
from graphpp.runtime.dtensors import local_tensor, whole_tensor
from graphpp.runtime.fsdp.sharded_parameters import ShardedParameters
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.ownership.models import Model, X, compiled, init, on_meta, whole
from tests.ownership.test_materialize import Wide, anonymous
from tests.sharding import Mesh

ONE, SHARD2, SHARD3, SHARD4 = (Mesh((ranks,), ("dp_shard",)) for ranks in (1, 2, 3, 4))
PIPE, HYBRID = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("dp_replicate", "dp_shard"))
MIB = 2**20


def wholes(pipe: graphpp.Pipeline) -> dict[str, Tensor]:
    """This rank's entries of the state dict and other buffers, whole. Called by all ranks."""
    assert all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
    return {key: whole_tensor(value).clone() for key, value in [*pipe.state_dict().items(), *pipe.named_buffers()]}


def scaled(module: nn.Module) -> None:
    """Takes values that earlier calls have written, and changes a part of them."""
    init(module)
    if isinstance(module, Model):
        with torch.no_grad():
            module.embedding.weight[2].zero_()
            for block in module.blocks:
                block.up.weight.div_(torch.linalg.vector_norm(block.up.weight))


def sharded(mesh: Mesh, split: Any, **options: Any) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    mixed = {"reduce_dtype": torch.float32} if mesh == ONE else {}  # one rank has shards if it is asked for something of theirs
    return compiled(on_meta(), mesh=mesh.made(), split=split, parallel=graphpp.Parallel(**mixed, **options))


Part = tuple[dict[str, Tensor], Tensor, Tensor]


def initialised(rank: int, mesh: Mesh, split: Any, function: Any, seed: int | None) -> Part:
    pipe = sharded(mesh, split)
    torch.manual_seed(5)
    pipe.materialize(function, seed=seed)
    state = torch.get_rng_state()
    return wholes(pipe), state, pipe.step(X, target=X).losses


def alone(rank: int, function: Any, seed: int | None) -> Part:
    torch.set_num_threads(1)
    pipe = compiled(on_meta())
    torch.manual_seed(5)
    pipe.materialize(function, seed=seed)
    state = torch.get_rng_state()
    found = {key: value.detach().clone() for key, value in [*pipe.state_dict().items(), *pipe.named_buffers()]}
    return found, state, pipe.step(X, target=X).losses


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("mesh", "split", "function", "seed"),
    [
        (ONE, None, init, None),
        (SHARD2, None, scaled, None),
        *further((SHARD4, ["blocks.1", "blocks.3"], init, 7), (PIPE, ["blocks.1.up"], init, None)),
        *further((HYBRID, None, scaled, 7), (SHARD3, None, scaled, None), (PIPE, 2, init, 7), (SHARD4, None, init, None)),
    ],
)
def test_values_are_those_of_one_process(mesh: Mesh, split: Any, function: Any, seed: int | None) -> None:
    expected, state, losses = run_ranks(alone, 1, function, seed)[0]
    for found, after, own in run_ranks(initialised, mesh.ranks, mesh, split, function, seed):
        assert torch.equal(after, state)
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
        assert torch.equal(own, losses)


def other_values(rank: int, mesh: Mesh) -> tuple[dict[str, Tensor], str]:
    """Replicas that draw other numbers take those of the first one, or are refused."""
    pipe = sharded(mesh, None, replica_values="broadcast")
    torch.manual_seed(rank)
    pipe.materialize(init)
    pipe.step(X, target=X)
    other = sharded(mesh, None)
    torch.manual_seed(rank)
    other.materialize(init)
    with pytest.raises(graphpp.MismatchError) as error:
        other.step(X, target=X)
    return {fqn: whole_tensor(parameter) for fqn, parameter in pipe.named_parameters()}, str(error.value)


@pytest.mark.parametrize(("mesh",), [(SHARD2,), *further((HYBRID,))])
def test_replicas_begin_alike(mesh: Mesh) -> None:
    expected = Model()
    torch.manual_seed(0)
    expected.apply(init)
    for found, error in run_ranks(other_values, mesh.ranks, mesh):
        assert all(torch.equal(value, expected.get_parameter(fqn)) for fqn, value in found.items())
        assert "with which replicas must begin alike" in error


def unwritten(rank: int) -> str:
    pipe = sharded(SHARD2, None)
    before = {fqn: parameter for fqn, parameter in pipe.named_parameters()}
    with pytest.raises(graphpp.GraphPPError) as error:
        pipe.materialize(lambda module: None if isinstance(module, nn.LayerNorm) else init(module))
    assert all(parameter is before[fqn] and parameter.is_meta for fqn, parameter in pipe.named_parameters())
    pipe.materialize(init)
    assert wholes(pipe)
    return str(error.value)


def test_parameters_that_nothing_writes_are_named_and_undone() -> None:
    for text in run_ranks(unwritten, 2):
        assert "8 tensors have no values, or NaN: blocks.0.norm.weight of a LayerNorm" in text


def read(rank: int, mesh: Mesh, split: Any, folder: Path, strict: bool) -> dict[str, Tensor]:
    pipe = sharded(mesh, split)
    pipe.materialize(init, weights=folder, strict=strict)
    found = wholes(pipe)
    pipe.step(X, target=X)
    return found


def write(form: str, state: dict[str, Tensor], folder: Path) -> None:
    if form == "torch":
        torch.save(state, folder / "model.pt")
    elif form == "distributed":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns in a program of one process
            dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("mesh", "split", "form"),
    [
        (SHARD2, None, "distributed"),
        *further((PIPE, 2, "not all"), (SHARD3, None, "safetensors"), (HYBRID, None, "torch")),
        *further((ONE, None, "safetensors"), (PIPE, 2, "distributed")),
    ],
)
def test_weights_are_those_of_the_files(mesh: Mesh, split: Any, form: str, tmp_path: Path) -> None:
    model = whole()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["blocks.0.norm.bias"][0] = torch.nan  # of which files may have some
    left_out = ("head.weight", "blocks.2.up.weight") if form == "not all" else ("head.weight",)
    write(form, {key: value for key, value in state.items() if key not in left_out}, tmp_path)
    for found in run_ranks(read, mesh.ranks, mesh, split, tmp_path, form != "not all"):
        for key, value in found.items():
            if key in state and not (form == "not all" and key == "blocks.2.up.weight"):
                assert torch.equal(value.nan_to_num(7), state[key].nan_to_num(7)), key
            assert key == "blocks.0.norm.bias" or not value.is_floating_point() or not value.isnan().any()


def peak(rank: int, mesh: Mesh, weights: Path | None) -> tuple[int, int, int]:
    """The most anonymous memory while the model gets its values, this rank's shards, and its whole stages, in bytes."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model, x = Wide(), torch.empty(1, 1024)
    example = graphpp.Microbatch((x,), target=x)
    split = 2 if "pp" in mesh.names else None
    pipe = graphpp.compile(model, nn.functional.mse_loss, example=example, mesh=mesh.made(), split=split, microbatches=2)
    whole, found, take = sum(each.nbytes for each in pipe.parameters()), [], ShardedParameters.take

    def seen(sharded: ShardedParameters, fqn: str, values: Tensor) -> None:
        take(sharded, fqn, values)
        found.append(anonymous())

    before = anonymous()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardedParameters, "take", seen)
        pipe.materialize(uniform, weights=weights)
    found.append(anonymous())
    return max(found) - before, sum(local_tensor(each).nbytes for each in pipe.parameters()), whole


def uniform(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.uniform_()


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of a process")
@pytest.mark.parametrize(
    ("mesh", "form"),
    [
        (PIPE, "safetensors"),
        *further((SHARD4, "init"), (PIPE, "init"), (SHARD4, "safetensors"), (SHARD4, "torch"), (SHARD4, "distributed")),
    ],
)
def test_a_rank_takes_memory_for_its_shards_and_one_layer(mesh: Mesh, form: str, tmp_path: Path) -> None:
    """A layer has 4 MiB. Torch's reader of distributed checkpoints has three of it: bytes, the tensor in them, the result."""
    copies = 3 if form == "distributed" else 1
    if form != "init":
        write(form, {f"layers.{at}.weight": torch.ones(1024, 1024) for at in range(24)}, tmp_path)
    for most, shards, stages in run_ranks(peak, mesh.ranks, mesh, None if form == "init" else tmp_path):
        assert stages == 96 * MIB // (mesh.sizes[0] if "pp" in mesh.names else 1)
        assert shards == 24 * MIB
        assert most < shards + (4 * copies + 4) * MIB
