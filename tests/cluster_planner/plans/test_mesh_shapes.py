"""The shapes of a mesh that the search for plans tries."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest

from graphpp.cluster_planner.plans.mesh_shapes import MeshLimits, MeshShape, mesh_shapes


def _all(gpus: int, batch: int, limits: MeshLimits) -> set[MeshShape]:
    """By trying all sizes."""
    sizes = range(1, gpus + 1)
    kinds = product(product(sizes, repeat=6), (False, True))
    shapes = (MeshShape(*each, folded=folded) for each, folded in kinds if _product(each) == gpus)
    return {shape for shape in shapes if _fits(shape, batch, limits)}


def _product(numbers: tuple[int, ...]) -> int:
    found = 1
    for each in numbers:
        found *= each
    return found


def _fits(shape: MeshShape, batch: int, limits: MeshLimits) -> bool:
    return (
        batch % (shape.dp_replicate * shape.dp_shard * shape.ep) == 0
        and shape.pp <= limits.stages
        and limits.tp % shape.tp == 0
        and shape.tp <= limits.domain
        and shape.cp <= limits.cp
        and max(limits.experts, 1) % shape.expert_ranks == 0
        and (not shape.folded or (shape.cp * shape.tp > 1 and limits.experts > 0))
        and all(size in (1, 2, 4, 8) for size in (shape.tp, shape.cp))
        and (shape.dp_shard == 1 or shape.dp_replicate == 1 or _within_a_machine(shape, limits))
    )


def _within_a_machine(shape: MeshShape, limits: MeshLimits) -> bool:
    """Whether parameters are sharded over as many ranks of a machine as divide the data ranks."""
    return shape.dp_shard == gcd(shape.dp_replicate * shape.dp_shard, max(1, limits.domain // shape.stride("dp_shard")))


@pytest.mark.parametrize("gpus", [1, 2, 6, 8])
@pytest.mark.parametrize(
    "limits",
    [MeshLimits(4), MeshLimits(8, experts=6, tp=8, cp=2), MeshLimits(2, tp=8, domain=2), MeshLimits(1, experts=4, cp=4)],
)
def test_every_shape_that_fits_is_found_once(gpus: int, limits: MeshLimits) -> None:
    found = list(mesh_shapes(gpus, 24, limits))
    assert len(found) == len(set(found))
    assert set(found) == _all(gpus, 24, limits)


def test_a_batch_that_no_ranks_can_share_leaves_shapes_out() -> None:
    assert {shape.data_ranks for shape in mesh_shapes(8, 2, MeshLimits(8))} == {1, 2}


def test_machines_that_are_filled_in_part_have_meshes() -> None:
    found = set(mesh_shapes(60, 120, MeshLimits(32, tp=8)))
    assert {MeshShape(pp=15, dp_shard=4), MeshShape(pp=5, dp_shard=3, tp=4), MeshShape(dp_shard=60)} <= found
    assert all(shape.ranks == 60 and shape.tp in (1, 2, 4) for shape in found)


def test_neighbours_along_inner_dimensions_are_near() -> None:
    shape = MeshShape(pp=2, dp_replicate=3, dp_shard=5, ep=7, cp=11, tp=13)
    assert shape.ranks == 2 * 3 * 5 * 7 * 11 * 13
    assert [shape.stride(name) for name in ("tp", "cp", "ep", "pp")] == [1, 13, 13 * 11, shape.ranks // 2]
