"""Makes a `RankPlace` from a `DeviceMesh` with some of the dimensions `pp`, `dp_replicate`, `dp_shard`, `ep`, `cp`, `tp`.

Contract: the dimensions may have any order. Ranks that differ only in `dp_replicate`, `dp_shard`, `ep` and `cp` train the same
stages on other tokens: they are replicas. Along `ep` they have other experts. Experts are sharded over `dp_shard`, all other
parameters over `dp_shard` and `ep`. Raises `GraphPPError` for an unknown or missing dimension name, and if the ranks along a
sharded dimension do not ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp._torch.distributed import group_of
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace, Sharding, SpreadExperts

PIPELINE, TENSOR = "pp", "tp"
_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT = "dp_replicate", "dp_shard", "ep", "cp"
_DATA = (_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT)  # dimensions whose ranks train the same stages on other tokens
_KNOWN = (PIPELINE, *_DATA, TENSOR)


def place_in(mesh: DeviceMesh, everyone: dist.ProcessGroup, device: torch.device, least_shards: int) -> RankPlace:
    """The place of this rank. `everyone`: the ranks of the mesh. `least_shards`: the fewest ranks that get shards."""
    data = [name for name in _DATA if name in dimensions(mesh)]
    shards = [name for name in (_SHARDS, _EXPERTS) if name in data]
    shares_layers, spreads_experts = _size(mesh, TENSOR) > 1, _size(mesh, _EXPERTS) > 1
    sharded = _SHARDS in data and _size(mesh, *shards) >= least_shards
    sharding = _sharding(mesh, shards, TENSOR) if sharded else None
    experts = None
    if spreads_experts:
        same = [name for name in _DATA if name != _EXPERTS and _size(mesh, name) > 1]
        of_experts = _sharding(mesh, [_SHARDS], _EXPERTS) if sharded else None
        experts = SpreadExperts(mesh.get_group(_EXPERTS), _along(mesh, *same), of_experts)
    return RankPlace(
        device,
        group=_along(mesh, PIPELINE),
        replicas=_along(mesh, *data),
        cp_ep_group=_along(mesh, *(name for name in (_CONTEXT, _EXPERTS) if _size(mesh, name) > 1)),
        tp_group=mesh.get_group(TENSOR) if shares_layers else None,
        pp_tp_group=_along(mesh, PIPELINE, TENSOR) if shares_layers else None,
        experts=experts,
        sharding=sharding,
        parts_group=_along(mesh, PIPELINE, TENSOR, _SHARDS, _EXPERTS) if sharded or spreads_experts else None,
        mesh=mesh,
        everyone=everyone,
    )


def dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the mesh's dimensions. Raises `GraphPPError` for an unknown or missing name."""
    if not mesh.mesh_dim_names:
        raise GraphPPError(f"mesh: its dimensions have no names: give mesh_dim_names=({PIPELINE!r},) to init_device_mesh")
    for name in mesh.mesh_dim_names:
        if name not in _KNOWN:
            raise GraphPPError(f"mesh: unknown dimension {name!r}; there are {', '.join(map(repr, _KNOWN))}")
    return tuple(mesh.mesh_dim_names)


def described(mesh: DeviceMesh) -> str:
    """Names and sizes of the dimensions, and the ranks: "pp 2, dp_shard 2 of the ranks [[0, 1], [2, 3]]"."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return f"{', '.join(f'{name} {size}' for name, size in sizes)} of the ranks {mesh.mesh.tolist()}"


def all_ranks(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Called by all ranks of the mesh."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else group_of(sorted(mesh.mesh.flatten().tolist()))


def pipeline_size(mesh: DeviceMesh) -> int:
    return _size(mesh, PIPELINE) if PIPELINE in dimensions(mesh) else 1


def shard_size(mesh: DeviceMesh) -> int:
    """The number of ranks over which parameters that are no experts are sharded; 1: not sharded."""
    return _size(mesh, _SHARDS, _EXPERTS) if _SHARDS in dimensions(mesh) else 1


def _sharding(mesh: DeviceMesh, names: Sequence[str], spread: str) -> Sharding:
    """Parameters sharded over the dimensions `names`; the model itself spreads some over the dimension `spread`."""
    others = [name for name in (_REPLICAS, _CONTEXT) if _size(mesh, name) > 1]
    own = _one_dimension(mesh, names)
    made = Sharding(own, _spread_mesh(mesh, spread, names, own), _along(mesh, *others))
    if dist.get_rank(made.group) != made.rank:
        raise GraphPPError(f"mesh: the ranks along {names[0]!r} must ascend, as init_device_mesh lays them out")
    return made


def _one_dimension(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """The ranks along some dimensions, flattened into one with the first name."""
    several = [name for name in names if _size(mesh, name) > 1]
    if len(several) < 2:
        return mesh[several[0] if several else names[0]]
    group = group_of(_ranks_along(mesh, several))
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=(names[0],))


def _spread_mesh(mesh: DeviceMesh, spread: str, names: Sequence[str], last: DeviceMesh) -> DeviceMesh:
    """A mesh of a dimension `spread`, unless of size 1, and one of the ranks along `names`, as in the mesh `last`."""
    if _size(mesh, spread) == 1:
        return last
    rows = [_ranks_along(mesh, names, at) for at in mesh[spread].mesh.tolist()]
    groups = [mesh.get_group(spread), last.get_group()]
    return DeviceMesh.from_group(groups, mesh.device_type, torch.tensor(rows), mesh_dim_names=(spread, names[0]))


def _size(mesh: DeviceMesh, *names: str) -> int:
    """The number of ranks along some dimensions together; a missing dimension counts as 1."""
    there = mesh.mesh_dim_names or ()
    return prod(mesh.size(there.index(name)) for name in names if name in there)


def _along(mesh: DeviceMesh, *names: str) -> dist.ProcessGroup | None:
    """The process group of the ranks with this rank's coordinates in all other dimensions; None if the mesh has no `names`."""
    there = [name for name in names if name in (mesh.mesh_dim_names or ())]
    if len(there) < 2:
        return mesh.get_group(there[0]) if there else None
    return group_of(_ranks_along(mesh, there))


def _ranks_along(mesh: DeviceMesh, names: Sequence[str], rank: int | None = None) -> list[int]:
    """The world ranks with the coordinates of `rank` (None: this one) in all other dimensions, ascending."""
    own = dist.get_rank() if rank is None else rank
    coordinates = (mesh.mesh == own).nonzero()[0].tolist()
    assert mesh.mesh_dim_names is not None
    pairs = zip(mesh.mesh_dim_names, coordinates, strict=True)
    found = mesh.mesh[tuple(slice(None) if name in names else at for name, at in pairs)]
    return sorted(found.flatten().tolist())
