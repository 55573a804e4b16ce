"""What a rank holds of a model whose experts `ep` spreads: state dicts, files, checkpoints, values by materialize."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import graphpp
from graphpp.checkpoint.in_progress import UnfinishedSave
from graphpp.ownership.initialize import reset
from graphpp.runtime.dtensors import local_tensor, whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.expert_parallel import mixture
from tests.sharding import Mesh, check_resume, check_state_dicts, resumed
from tests.tensor_parallel import batch, compiled

ONE, EXPERTS, PIPE = Mesh((), ()), Mesh((2,), ("ep",)), Mesh((2, 2), ("pp", "ep"))
SHARDS, REPLICAS = Mesh((2, 2), ("dp_shard", "ep")), Mesh((2, 2), ("dp_replicate", "ep"))
SHARDED_PIPE = Mesh((2, 1, 2), ("pp", "dp_shard", "ep"))


def pipeline(mesh: Mesh, *, meta: bool = False) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    made = mesh.made() if mesh.names else None
    with torch.device("meta" if meta else "cpu"):
        model = mixture(None if made is None else made["ep"])
    return compiled(made, model, split=["layers.1"], schedule="1F1B")


def states(rank: int, mesh: Mesh, folder: Path) -> None:
    pipe = pipeline(mesh)
    assert all(isinstance(value, DTensor) for key, value in pipe.state_dict().items() if "experts" in key)
    check_state_dicts(pipe, mixture(None).state_dict(), folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh",), [(SHARDS,), *further((PIPE,), (EXPERTS,), (REPLICAS,), (SHARDED_PIPE,))])
def test_state_dicts_and_files_have_the_whole_values(mesh: Mesh, tmp_path: Path) -> None:
    run_ranks(states, mesh.ranks, mesh, tmp_path)


def trained(rank: int, mesh: Mesh, folder: Path, saves: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters in a checkpoint, which this mesh saves after two steps or another one has saved; and a step after it."""
    pipe = pipeline(mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    checkpoint = pipe.checkpoint(optimizer)

    def step(number: int) -> None:
        tokens, target = batch(number)
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return resumed(pipe, checkpoint, folder, step, saves=saves)


def saves_late(rank: int, folder: Path) -> bool:
    """A save whose folder the first rank makes late."""
    begin = UnfinishedSave.begin

    def late(save: UnfinishedSave) -> None:
        time.sleep(1)
        begin(save)

    pipe = pipeline(PIPE)
    with patch.object(UnfinishedSave, "begin", late):
        pipe.checkpoint(torch.optim.SGD(pipe.parameters(), lr=0.1)).save(folder)
    return (folder / ".metadata").exists()


def test_no_rank_writes_before_the_folder_of_a_save_is_there(tmp_path: Path) -> None:
    assert all(run_ranks(saves_late, PIPE.ranks, tmp_path))


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (PIPE, ONE),
        *further((SHARDED_PIPE, EXPERTS), (ONE, SHARDS), (EXPERTS, PIPE), (Mesh((2, 1, 2), ("dp_shard", "ep", "tp")), ONE)),
        *further((PIPE, SHARDS), (REPLICAS, EXPERTS), (EXPERTS, REPLICAS)),
    ],
)
def test_a_checkpoint_fits_every_mesh(saves: Mesh, loads: Mesh, tmp_path: Path) -> None:
    check_resume(trained, saves, loads, tmp_path, rtol=1e-5, atol=1e-6)


def filled(rank: int, mesh: Mesh) -> None:
    """Give a model on the meta device the values that one process initialises, and train a step."""
    pipe = pipeline(mesh, meta=True)
    torch.manual_seed(5)
    pipe.materialize()
    expected = mixture(None)
    torch.manual_seed(5)
    expected.apply(reset)
    wanted = expected.state_dict()
    for key, value in pipe.state_dict().items():
        assert torch.equal(whole_tensor(value), wanted[key])
    tokens, target = batch(0)
    first = pipe.step(tokens, target=target).loss
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    assert pipe.step(tokens, target=target).loss < first


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh",), [(SHARDS,), *further((PIPE,), (EXPERTS,), (SHARDED_PIPE,))])
def test_models_on_meta_get_the_values_of_one_process(mesh: Mesh) -> None:
    run_ranks(filled, mesh.ranks, mesh)


def bytes_of_plan(rank: int, mesh: Mesh) -> tuple[int, int]:
    """The bytes of this rank's shards: as the plan says, and as the rank has them."""
    made = mesh.made()
    pipe = compiled(made, mixture(made["ep"]), split=["layers.1"], schedule="1F1B")
    own = sum(local_tensor(parameter).nbytes for parameter in pipe.parameters())
    return pipe.plan.memory.ranks[pipe._place.rank].shards, 2 * own  # parameters, and the sums of their gradients


def test_the_plan_counts_shards_of_experts_by_their_own_ranks() -> None:
    for said, held in run_ranks(bytes_of_plan, 4, SHARDED_PIPE):
        assert said == held
