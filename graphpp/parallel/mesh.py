"""Makes a `RankPlace` from a `DeviceMesh` with some of the dimensions `pp`, `dp_replicate`, `dp_shard`, `ep`, `cp`, `tp`.

Contract: the dimensions may have any order. Ranks that differ only in `dp_replicate`, `dp_shard`, `ep` and `cp` train the same
stages on other tokens: they are replicas. Along `ep` they have other experts. Experts are sharded over `dp_shard`, all other
parameters over `dp_shard` and `ep`. Ranks stand in the order of the mesh: the rank at `pp` 0 has the first stage. Raises
`GraphPPError` for an unknown or missing dimension name, and for ranks along `ep`, `cp` or `tp` that do not ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp.errors import GraphPPError
from graphpp.parallel.groups import own_group
from graphpp.parallel.rank_place import RankPlace, Sharding, SpreadExperts
from graphpp.parallel.rank_tree import RankTree

PIPELINE, TENSOR = "pp", "tp"
_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT = "dp_replicate", "dp_shard", "ep", "cp"
_DATA = (_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT)  # dimensions whose ranks train the same stages on other tokens
_MODELS = (_EXPERTS, _CONTEXT, TENSOR)  # dimensions along which the model itself exchanges values
_KNOWN = (PIPELINE, *_DATA, TENSOR)


def place_in(
    mesh: DeviceMesh, everyone: RankTree | None, device: torch.device, least_shards: int
) -> RankPlace:
    """The place of this rank. `everyone`: the ranks of the mesh. `least_shards`: the fewest ranks that get shards."""
    along = _Along(mesh, everyone)
    data = [name for name in _DATA if name in dimensions(mesh)]
    shards = [name for name in (_SHARDS, _EXPERTS) if name in data]
    spreads_experts = _size(mesh, _EXPERTS) > 1
    sharded = _SHARDS in data and _size(mesh, *shards) >= least_shards
    sharding = along.sharding(shards, TENSOR) if sharded else None
    experts = None
    if spreads_experts:
        of_experts = along.sharding([_SHARDS], _EXPERTS) if sharded else None
        experts = SpreadExperts(along.own(_EXPERTS), along(*(name for name in _DATA if name != _EXPERTS)), of_experts)
    return RankPlace(
        device,
        group=along(PIPELINE),
        replicas=along(*data),
        cp_ep_group=along(_CONTEXT, _EXPERTS),
        tp_group=along(TENSOR),
        pp_tp_group=along(PIPELINE, TENSOR),
        experts=experts,
        sharding=sharding,
        parts=_ranks_along(mesh, (PIPELINE, TENSOR, _SHARDS, _EXPERTS)) if sharded or spreads_experts else None,
        mesh=mesh,
        everyone=everyone,
    )


class _Along:
    """The own groups of ranks along some dimensions: those with this rank's coordinates in all other dimensions."""

    def __init__(self, mesh: DeviceMesh, everyone: RankTree | None) -> None:
        self._mesh, self._like = mesh, mesh.get_group(0) if everyone is None else everyone.groups[0]

    def __call__(self, *names: str) -> dist.ProcessGroup | None:
        """None if this rank is alone."""
        return self.own(*names) if _size(self._mesh, *names) > 1 else None

    def own(self, *names: str) -> dist.ProcessGroup:
        return own_group(_ranks_along(self._mesh, names), self._like)

    def sharding(self, names: Sequence[str], spread: str) -> Sharding:
        """Parameters sharded over the dimensions `names`; the model itself spreads some over the dimension `spread`."""
        own = DeviceMesh.from_group(self.own(*names), self._mesh.device_type, mesh_dim_names=(names[0],))
        spread_mesh, stage_mesh = (self._spread_mesh(each, names, own) for each in (spread, PIPELINE))
        return Sharding(own, spread_mesh, stage_mesh, self(_REPLICAS, _CONTEXT))

    def _spread_mesh(self, spread: str, names: Sequence[str], last: DeviceMesh) -> DeviceMesh:
        """A mesh of a dimension `spread`, unless of size 1, and one of the ranks along `names`, as in the mesh `last`."""
        if _size(self._mesh, spread) == 1:
            return last
        rows = [_ranks_along(self._mesh, names, at) for at in _ranks_along(self._mesh, [spread])]
        groups = [self.own(spread), last.get_group()]
        return DeviceMesh.from_group(groups, self._mesh.device_type, torch.tensor(rows), mesh_dim_names=(spread, names[0]))


def dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the mesh's dimensions. Raises `GraphPPError` for an unknown or missing name, and for ranks out of order."""
    if not mesh.mesh_dim_names:
        raise GraphPPError(f"mesh: its dimensions have no names: give mesh_dim_names=({PIPELINE!r},) to init_device_mesh")
    for at, name in enumerate(mesh.mesh_dim_names):
        if name not in _KNOWN:
            raise GraphPPError(f"mesh: unknown dimension {name!r}; there are {', '.join(map(repr, _KNOWN))}")
        if name in _MODELS and bool((mesh.mesh.diff(dim=at) < 0).any()):
            raise GraphPPError(f"mesh: the ranks along {name!r} must ascend: torch's own collectives of a model sort them")
    return tuple(mesh.mesh_dim_names)


def described(mesh: DeviceMesh) -> str:
    """Names and sizes of the dimensions, and the ranks: "pp 2, dp_shard 2 of the ranks [[0, 1], [2, 3]]"."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return f"{', '.join(f'{name} {size}' for name, size in sizes)} of the ranks {mesh.mesh.tolist()}"


def pipeline_size(mesh: DeviceMesh) -> int:
    return _size(mesh, PIPELINE) if PIPELINE in dimensions(mesh) else 1


def shard_size(mesh: DeviceMesh) -> int:
    """The number of ranks over which parameters that are no experts are sharded; 1: not sharded."""
    return _size(mesh, _SHARDS, _EXPERTS) if _SHARDS in dimensions(mesh) else 1


def _size(mesh: DeviceMesh, *names: str) -> int:
    """The number of ranks along some dimensions together; a missing dimension counts as 1."""
    there = mesh.mesh_dim_names or ()
    return prod(mesh.size(there.index(name)) for name in names if name in there)


def _ranks_along(mesh: DeviceMesh, names: Sequence[str], rank: int | None = None) -> list[int]:
    """The world ranks with the coordinates of `rank` (None: this one) in all other dimensions, as the mesh has them."""
    own = dist.get_rank() if rank is None else rank
    coordinates = (mesh.mesh == own).nonzero()[0].tolist()
    assert mesh.mesh_dim_names is not None
    pairs = zip(mesh.mesh_dim_names, coordinates, strict=True)
    found = mesh.mesh[tuple(slice(None) if name in names else at for name, at in pairs)]
    return found.flatten().tolist()
