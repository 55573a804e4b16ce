"""`mesh=`: a `DeviceMesh`, a process group or None become this rank's place; every other mesh is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphpp
from graphpp.errors import GraphPPError
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
        "planned": lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "ep")),
        "unknown": lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("stage",)),
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
    "planned": "mesh: the dimension 'ep' is not there yet",
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


def verified(rank: int) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(4, 4)
    example = graphpp.Microbatch((x,), target=x)
    found = graphpp.verify(model, nn.functional.mse_loss, example, mesh=mesh, schedule="1F1B")
    return found.plan.schedule.ranks, found.ok


def test_verify_takes_the_number_of_ranks_from_the_mesh() -> None:
    assert run_ranks(verified, 2) == [(2, True)] * 2
