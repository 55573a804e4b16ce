"""Experts on another factorisation of the ranks than attention train like one process; meshes that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import graphpp
from graphpp.ownership.initialize import reset
from graphpp.pipeline.grad_norm import share_overflow_
from graphpp.runtime.dtensors import local_tensor, whole_tensor
from tests.distributed import DEVICE, run_ranks
from tests.exhaustive import further
from tests.pipeline.expert_parallel.folded import CUTS, Mixture, folded, train_alone, train_folded
from tests.sharding import Mesh, check_resume, check_state_dicts, resumed
from tests.tensor_parallel import assert_near, batch, compiled

ONE, LAYERS = Mesh((), ()), Mesh((2,), ("tp",))
DATA_LAYERS, SHARDED_LAYERS, PIPE = (
    Mesh((2, 2), ("dp_replicate", "tp")),
    Mesh((2, 2), ("dp_shard", "tp")),
    Mesh((2, 2), ("pp", "tp")),
)
OVER_ALL, OVER_LAYERS, OVER_DATA = (
    Mesh((4,), ("ep",)),
    Mesh((2, 2), ("dp_replicate", "ep")),
    Mesh((2, 2), ("ep", "dp_replicate")),
)
SHARDED, TOGETHER = Mesh((2, 2), ("dp_shard", "ep")), Mesh((2, 2), ("ep", "etp"))
OF_PIPE, DATA, SHARDS = Mesh((2, 2), ("pp", "ep")), Mesh((4,), ("dp_replicate",)), Mesh((4,), ("dp_shard",))
SHARED_SHARDS = Mesh((2, 1, 2), ("dp_shard", "ep", "etp"))


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "experts", "options"),
    [
        (SHARDED_LAYERS, SHARDED, {"parallel": {"keep": 0}, "split": CUTS[2]}),
        *further(
            (DATA_LAYERS, OVER_ALL, {}),
            (LAYERS, Mesh((2, 1), ("dp_replicate", "ep")), {}),
            (DATA_LAYERS, Mesh((2, 1, 2), ("dp_replicate", "ep", "etp")), {}),
            (SHARDED_LAYERS, Mesh((2, 1, 2), ("dp_shard", "ep", "etp")), {}),
            (SHARDED_LAYERS, Mesh((2, 1, 2), ("dp_replicate", "dp_shard", "ep")), {}),
            (LAYERS, Mesh((2,), ("ep",)), {}),
            (DATA_LAYERS, OVER_LAYERS, {}),
            (DATA_LAYERS, OVER_DATA, {}),
            (DATA_LAYERS, TOGETHER, {}),
            (DATA, TOGETHER, {}),
            (SHARDS, SHARED_SHARDS, {"parallel": {"keep": 0}}),
            (SHARDS, Mesh((1, 2, 2), ("dp_shard", "ep", "etp")), {"split": CUTS[2], "parallel": {"keep": 1}}),
            (SHARDED_LAYERS, Mesh((1, 4), ("dp_shard", "ep")), {}),
            (Mesh((1, 2), ("dp_shard", "tp")), Mesh((1, 2), ("dp_shard", "ep")), {}),
            (PIPE, OF_PIPE, {"split": CUTS[2], "schedule": "1F1B"}),
            (PIPE, OF_PIPE, {"split": CUTS[4], "schedule": "ZBVZeroBubble", "memory": "full"}),
            (PIPE, OF_PIPE, {"split": CUTS[4], "schedule": "DualPipeV"}),
            (PIPE, OF_PIPE, {"split": CUTS[2], "backend": "inductor"}),
            (Mesh((2, 2, 2), ("pp", "dp_replicate", "tp")), Mesh((2, 4), ("pp", "ep")), {"split": CUTS[2]}),
            (
                Mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
                Mesh((2, 2, 2), ("dp_replicate", "dp_shard", "ep")),
                {},
            ),
        ),
    ],
)
def test_a_training_is_that_of_one_process(mesh: Mesh, experts: Mesh, options: dict[str, Any]) -> None:
    expected = train_alone(mesh.replicas)
    found = run_ranks(train_folded, mesh.ranks, mesh, experts, options)
    assert all(each.norms == found[0].norms for each in found)
    for each in found:
        assert_near(each, expected)


def pipeline(mesh: Mesh, experts: Mesh, *, meta: bool = False) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    made, places = (each.made() if each.names else None for each in (mesh, experts))
    with torch.device("meta" if meta else "cpu"):
        model = folded(made, places)
    return compiled(made, model, split=CUTS[2], schedule="1F1B", parallel=graphpp.Parallel(expert_mesh=places))


def states(rank: int, mesh: Mesh, experts: Mesh, folder: Path) -> None:
    check_state_dicts(pipeline(mesh, experts), folded(None, None).state_dict(), folder)
    pipe = pipeline(mesh, experts, meta=True)
    torch.manual_seed(5)
    pipe.materialize()
    expected = folded(None, None)
    torch.manual_seed(5)
    expected.apply(reset)
    wanted = expected.state_dict()
    assert all(torch.equal(whole_tensor(value), wanted[key]) for key, value in pipe.state_dict().items())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "experts"),
    [(SHARDED_LAYERS, SHARDED), *further((DATA_LAYERS, OVER_DATA), (PIPE, OF_PIPE), (SHARDS, SHARED_SHARDS))],
)
def test_state_dicts_and_files_have_the_whole_values(mesh: Mesh, experts: Mesh, tmp_path: Path) -> None:
    run_ranks(states, mesh.ranks, mesh, experts, tmp_path)


def trained(rank: int, mesh: Mesh, folder: Path, saves: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters in a checkpoint, and a step after it."""
    pipe = pipeline(
        mesh, {DATA_LAYERS: OVER_LAYERS, SHARDED_LAYERS: SHARDED, SHARDS: SHARED_SHARDS, PIPE: OF_PIPE, ONE: ONE}[mesh]
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(number: int) -> None:
        tokens, target = batch(number)
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return resumed(pipe, pipe.checkpoint(optimizer), folder, step, saves=saves)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saves", "loads"), [(SHARDED_LAYERS, ONE), *further((ONE, SHARDS), (DATA_LAYERS, SHARDED_LAYERS), (SHARDS, PIPE))]
)
def test_a_checkpoint_fits_every_mesh(saves: Mesh, loads: Mesh, tmp_path: Path) -> None:
    check_resume(trained, saves, loads, tmp_path, rtol=1e-5, atol=1e-6)


def overflows(rank: int, mesh: Mesh, experts: Mesh) -> list[bool]:
    """Which gradients are infinite on a rank after the overflow of one expert on the last rank is shared."""
    pipe = pipeline(mesh, experts)
    tokens, target = batch(0)
    pipe.step(tokens, target=target)
    if rank == mesh.ranks - 1:
        local_tensor(dict(pipe.named_parameters())["layers.1.mixture.up"].grad).fill_(torch.inf)
    share_overflow_(pipe._gradients())
    return [
        bool(local_tensor(each.grad).isinf().any()) for each in pipe.parameters() if local_tensor(each.grad).numel()
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "experts"), [(SHARDED_LAYERS, SHARDED), *further((DATA_LAYERS, OVER_ALL), (PIPE, OF_PIPE))]
)
def test_an_overflow_of_one_expert_reaches_every_rank(mesh: Mesh, experts: Mesh) -> None:
    assert all(all(found) for found in run_ranks(overflows, mesh.ranks, mesh, experts))


OTHERS = {  # the expert mesh in the place of `OVER_ALL`
    "ranks": Mesh((2,), ("ep",)),
    "shards": SHARDED,
    "dimension": Mesh((2, 2), ("tp", "ep")),
    "order": Mesh((2, 2), ("etp", "ep")),
    "one dimension": TOGETHER,
    "etp alone": TOGETHER,
}


def refused(rank: int, what: str) -> str:
    torch.set_num_threads(1)
    mesh, experts = DATA_LAYERS.made(), OVER_ALL.made()
    model = folded(mesh, experts, shards_tokens=what != "tokens")
    experts = OTHERS[what].made() if what in OTHERS else experts
    if what == "no mesh":
        mesh = mesh.get_group("tp")
    if what == "two":
        mesh = Mesh((2, 2), ("ep", "tp")).made()
    if what == "falling shards":
        mesh = DeviceMesh(DEVICE.type, [[2, 3], [0, 1]], mesh_dim_names=("dp_shard", "tp"))
        experts = DeviceMesh(DEVICE.type, [[2, 3], [0, 1]], mesh_dim_names=("dp_shard", "ep"))
    if what == "cross":
        mesh = DeviceMesh(DEVICE.type, [[0, 2], [1, 3]], mesh_dim_names=("dp_replicate", "tp"))
        experts = DeviceMesh(DEVICE.type, [[0, 3], [1, 2]], mesh_dim_names=("dp_replicate", "ep"))
    if what in ("no group of etp", "groups in turn", "whole along etp", "other values along etp"):
        mesh, experts = DATA.made(), TOGETHER.made()
        model = folded(mesh, experts)
        _spoil(model.layers[1].mixture, experts, what, rank)
    if what == "whole":
        model.layers[1].mixture.up = nn.Parameter(distribute_tensor(torch.ones(4, 8, 12), experts, [Replicate()]))
    if what == "etp alone":
        model.layers[0].mixture.up = nn.Parameter(distribute_tensor(torch.ones(4, 8, 12), experts["etp"], [Shard(2)]))
    tokens, target = batch(0)
    with pytest.raises(graphpp.GraphPPError) as caught:
        compiled(mesh, model, parallel=graphpp.Parallel(expert_mesh=experts)).step(tokens, target=target)
    return str(caught.value)


def _spoil(mixture: Mixture, experts: DeviceMesh, what: str, rank: int) -> None:
    """Let ranks along `etp` exchange no tokens, or have other values or gradients of a scale that all of them have whole."""
    if what == "no group of etp":
        del mixture.groups["tensor_group"]
    elif what == "groups in turn":
        mixture.groups = {"group": mixture.groups["tensor_group"], "tensor_group": mixture.groups["group"]}
    else:
        ones = torch.ones(4, 1, 8) + (rank == 1 and what == "other values along etp")
        mixture.scale = nn.Parameter(DTensor.from_local(ones[:2], experts, [Shard(0), Replicate()], run_check=False))
        how = [Shard(0), Replicate() if what == "whole along etp" else Partial()]
        compute = mixture.compute
        mixture.compute = lambda x: compute(x) * mixture.scale.to_local(grad_placements=how)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tokens", "has the same tokens for the experts"),
        ("no group of etp", "each would train it with its own tokens alone"),
        *further(
            ("cross", "cross: order the dimensions"),
            ("groups in turn", "each would train it with its own tokens alone"),
            ("whole along etp", "would keep its own part of the gradient"),
            ("other values along etp", "the values of layers.1.mixture.scale"),
            ("falling shards", "must ascend"),
            ("no mesh", "give mesh= a DeviceMesh"),
            ("ranks", "must be those of mesh="),
            ("shards", "the dimension dp_shard"),
            ("dimension", "unknown dimension 'tp'"),
            ("order", "'ep' must stand before 'etp'"),
            ("two", "leave one of them out"),
            ("one dimension", "layers.0.mixture.up"),
            ("whole", "all ranks along ep have whole"),
            ("etp alone", "over ep and etp together"),
        ),
    ],
)
def test_meshes_and_models_that_do_not_fit_are_refused(what: str, said: str) -> None:
    assert all(said in found for found in run_ranks(refused, 4, what))
