"""`mesh=`: a `DeviceMesh`, a process group or None become this rank's place; every other mesh is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphpp
from graphpp.errors import GraphPPError, MismatchError
from graphpp.parallel.place import place_of
from tests.distributed import run_ranks


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def test_one_process_has_no_group() -> None:
    place = place_of(nn.Linear(1, 1), None, torch.device("cpu"))
    assert (place.group, place.replicas, place.rank, place.ranks) == (None, None, 0, 1)


def places(rank: int) -> list[Any]:
    """The pipeline's and the replicas' ranks of this rank under several meshes."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    meshes = [both, turned, both["pp"], both["dp_replicate"], dist.group.WORLD, None]
    found = [place_of(nn.Linear(1, 1), mesh, None) for mesh in meshes]
    return [(ranks_of(place.group), ranks_of(place.replicas), place.rank, place.ranks) for place in found]


def test_dimensions_are_pipelines_and_replicas() -> None:
    first, *_, last = run_ranks(places, 4)
    everyone = [0, 1, 2, 3]
    assert first == [([0, 1], [0, 2], 0, 2), ([0, 2], [0, 1], 0, 2), ([0, 1], None, 0, 2), (None, [0, 2], 0, 1),
                     (everyone, None, 0, 4), (everyone, None, 0, 4)]  # fmt: skip
    assert last == [([2, 3], [1, 3], 1, 2), ([1, 3], [2, 3], 1, 2), ([2, 3], None, 1, 2), (None, [1, 3], 0, 1),
                    (everyone, None, 3, 4), (everyone, None, 3, 4)]  # fmt: skip


def refused(rank: int, what: str) -> str:
    meshes: dict[str, Any] = {
        "unknown": lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("stage",)),
        "descending": lambda: DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)),
        "nameless": lambda: init_device_mesh("cpu", (2,)),
        "elsewhere": lambda: DeviceMesh("cpu", [1 - rank], mesh_dim_names=("pp",), _init_backend=False),
        "no member": lambda: dist.new_group([1 - rank]),
        "a number": lambda: 2,
        "another device": lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
    }
    device = torch.device("meta") if what == "another device" else None
    with pytest.raises(GraphPPError) as caught:
        place_of(nn.Linear(1, 1), meshes[what](), device)
    return str(caught.value)


WRONG = {
    "descending": "mesh: the ranks along 'cp' must ascend",
    "unknown": "mesh: unknown dimension 'stage'",
    "nameless": "mesh: its dimensions have no names",
    "elsewhere": "mesh: rank 0 is not in the mesh",
    "no member": "mesh: rank 0 is not in the group",
    "a number": "mesh: take a DeviceMesh, a ProcessGroup, or None, got int",
    "another device": "mesh: its ranks exchange tensors on cpu, but this rank runs on meta",
}


@pytest.mark.parametrize("what", WRONG)
def test_other_meshes_are_refused(what: str) -> None:
    assert WRONG[what] in run_ranks(refused, 2, what)[0]


def trained_on(rank: int, ranks: list[int]) -> tuple[bool, float, float, str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp",))
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=["2"], microbatches=2, mesh=mesh)
    loss = pipe.step(x, target=x).loss.item()
    return pipe.is_first, loss, pipe.clip_grad_norm_(1.0).item(), str(pipe.plan.rank_of_stage)


def test_stages_follow_the_order_of_the_ranks_in_the_mesh() -> None:
    ascending, descending = run_ranks(trained_on, 2, [0, 1]), run_ranks(trained_on, 2, [1, 0])
    assert [first for first, *_ in ascending] == [True, False] and [first for first, *_ in descending] == [False, True]
    assert len({tuple(rest) for _, *rest in (*ascending, *descending)}) == 1


def differing(rank: int, other: str) -> str:
    """The error of `compile` where rank 1 has another mesh than the ranks 0, 2, 3."""
    torch.set_num_threads(1)
    parallel = graphpp.Parallel(sum_order="any" if (rank, other) == (1, "option") else "ranks")
    names = {"turned": ("dp_shard", "pp"), "renamed": ("pp", "dp_replicate"), "unknown": ("pp", "data")}
    usual = ("pp", "dp_shard")
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=names.get(other, usual) if rank == 1 else usual)
    mesh = None if (rank, other) == (1, "none") else mesh
    with pytest.raises(GraphPPError) as caught:
        graphpp.compile(nn.Linear(1, 1), nn.functional.mse_loss, mesh=mesh, parallel=parallel)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("turned", "rank 1 differs in mesh=: it has dp_shard 2, pp 2 of the ranks [[0, 1], [2, 3]], the others have pp 2"),
        ("renamed", "rank 1 differs in mesh=: it has pp 2, dp_replicate 2"),
        ("unknown", "rank 1: GraphPPError: mesh: unknown dimension 'data'"),
        ("option", "rank 1 (pp 0, dp_shard 1) differs in parallel.sum_order=: it has any, the others have ranks"),
        ("none", "rank 1 differs in mesh=: it has a group of the ranks [0, 1, 2, 3], the others have pp 2, dp_shard 2 of the"),
    ],
)
def test_ranks_with_other_meshes_or_options_raise_on_all_ranks(other: str, words: str) -> None:
    found = run_ranks(differing, 4, other)
    for text in found[:1] + found[2:]:
        assert text.startswith("MismatchError") and words in text, text
    assert found[1].startswith("GraphPPError: mesh: unknown" if other == "unknown" else "MismatchError")


def other_rows(rank: int, odd: int) -> str:
    torch.set_num_threads(1)
    mesh, rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate")), torch.ones(6 if rank == odd else 4, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = graphpp.compile(model, nn.functional.mse_loss, mesh=mesh, split=["1"], microbatches=2)
    with pytest.raises(MismatchError) as caught:
        pipe.step(rows, target=rows)
    return str(caught.value)


def test_a_rank_that_differs_is_named_with_its_coordinates() -> None:
    first, second, *_ = run_ranks(other_rows, 4, 2)
    assert "rank 2 (pp 1, dp_replicate 0) differs in the microbatch" in first, first
    assert "(pp 1, dp_replicate 0)" in second or "(pp 0, dp_replicate 0)" in second, second


def keeps(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    with pytest.raises(GraphPPError) as caught:
        graphpp.compile(nn.Linear(1, 1), nn.functional.mse_loss, mesh=mesh, parallel=graphpp.Parallel(keep=1))
    return str(caught.value)


def test_keep_needs_ranks_to_gather_from() -> None:
    for text in run_ranks(keeps, 2):
        assert "parallel.keep=1: the option says how many stages are gathered along dp_shard" in text
