"""Makes a `RankPlace` from a `DeviceMesh` with some of the dimensions `pp`, `dp_replicate`, `dp_shard`, `ep`, `cp`, `tp`.

Contract: the dimensions may have any order. Ranks that differ only in `dp_replicate`, `dp_shard`, `ep` and `cp` train the same
stages on other tokens: they are replicas. Along `ep` they have other experts. Experts are sharded over `dp_shard`, all other
parameters over `dp_shard` and `ep`. Ranks stand in the order of the mesh: the rank at `pp` 0 has the first stage. Raises
`GraphPPError` for an unknown or missing dimension name, and for ranks along `ep`, `etp`, `cp` or `tp` that do not ascend.

A second mesh may place the experts (`parallel.expert_mesh`; parallel folding, arXiv 2504.14960). It has the same ranks, in
the dimensions `pp`, `dp_replicate`, `dp_shard`, `ep` and `etp` (ranks that share each expert). The first mesh then has no `ep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp.errors import GraphPPError
from graphpp.parallel.expert_layout import ExpertLayout, expert_layout
from graphpp.parallel.groups import own_group
from graphpp.parallel.rank_place import RankPlace, Sharding, SpreadExperts
from graphpp.parallel.rank_tree import RankTree

PIPELINE, TENSOR = "pp", "tp"
_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT, _EXPERT_TENSOR = "dp_replicate", "dp_shard", "ep", "cp", "etp"
_DATA = (_REPLICAS, _SHARDS, _EXPERTS, _CONTEXT)  # dimensions whose ranks train the same stages on other tokens
_SPREAD = (_EXPERTS, _EXPERT_TENSOR)  # dimensions along which ranks have other parts of the experts
_MODELS = (*_SPREAD, _CONTEXT, TENSOR)  # dimensions along which the model itself exchanges values
_KNOWN = (PIPELINE, *_DATA, TENSOR)
_KNOWN_OF_EXPERTS = (PIPELINE, _REPLICAS, _SHARDS, *_SPREAD)


def place_in(
    mesh: DeviceMesh,
    everyone: RankTree | None,
    device: torch.device,
    least_shards: int,
    expert_mesh: DeviceMesh | None = None,
) -> RankPlace:
    """The place of this rank. `everyone`: the ranks of the mesh. `least_shards`: the fewest ranks that get shards."""
    along = _Along(mesh, everyone)
    data = [name for name in _DATA if name in dimensions(mesh)]
    shards = [name for name in (_SHARDS, _EXPERTS) if name in data]
    most = max(_size(mesh, *shards), 1 if expert_mesh is None else _size(expert_mesh, _SHARDS))
    sharding = along.sharding(shards, [TENSOR]) if _SHARDS in data and most >= least_shards else None
    place = RankPlace(
        device,
        group=along(PIPELINE),
        replicas=along(*data),
        cp_ep_group=along(_CONTEXT, _EXPERTS),
        tp_group=along(TENSOR),
        pp_tp_group=along(PIPELINE, TENSOR),
        sharding=sharding,
        same_parameters=along(_REPLICAS, _CONTEXT) if sharding is not None else along(*data),
        parts=None if sharding is None else _ranks_along(mesh, (PIPELINE, TENSOR, _SHARDS)),
        mesh=mesh,
        everyone=everyone,
    )
    if expert_mesh is not None:
        layout = layout_of_experts(mesh, expert_mesh)
        place = replace(
            place,
            cp_ep_group=along.of_ranks(layout.exchanging),
            same_parameters=along.of_ranks(layout.same),
            parts=layout.model,
            expert_mesh=expert_mesh,
            tp_adds_to_experts=layout.tp_adds_to_experts,
        )
    elif _size(mesh, _EXPERTS) > 1:
        same = (_REPLICAS, _CONTEXT) if sharding is not None else (_REPLICAS, _SHARDS, _CONTEXT)
        parts = _ranks_along(mesh, (PIPELINE, TENSOR, _SHARDS, _EXPERTS))
        place = replace(place, same_parameters=along(*same), parts=parts, expert_mesh=mesh)
    return _with_experts(place)


def _with_experts(place: RankPlace) -> RankPlace:
    """The place with the ranks over which experts are spread, if its mesh of experts spreads them."""
    mesh = place.expert_mesh
    if mesh is None or (_size(mesh, *_SPREAD) == 1 and not place.tp_adds_to_experts):
        return place
    along, names = _Along(mesh, place.everyone), place.expert_dims
    own = {at: along.own(name) for at, name in enumerate(names) if _size(mesh, name) > 1}
    sharding = along.sharding([_SHARDS], names) if place.sharding is not None else None
    experts = SpreadExperts(along.own(*names), own, along(_REPLICAS, _SHARDS, _CONTEXT), sharding)
    return replace(place, experts=experts)


def layout_of_experts(mesh: DeviceMesh, expert_mesh: DeviceMesh) -> ExpertLayout:
    """The ranks of a mesh beside those of a mesh of experts. Raises `GraphPPError` if the meshes do not fit each other."""
    dimensions(mesh), dimensions(expert_mesh, _KNOWN_OF_EXPERTS)
    return expert_layout(mesh, expert_mesh)


class _Along:
    """The own groups of ranks along some dimensions: those with this rank's coordinates in all other dimensions."""

    def __init__(self, mesh: DeviceMesh, everyone: RankTree | None) -> None:
        self._mesh, self._like = mesh, mesh.get_group(0) if everyone is None else everyone.groups[0]

    def __call__(self, *names: str) -> dist.ProcessGroup | None:
        """None if this rank is alone."""
        return self.own(*names) if _size(self._mesh, *names) > 1 else None

    def own(self, *names: str) -> dist.ProcessGroup:
        return own_group(_ranks_along(self._mesh, names), self._like)

    def of_ranks(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        return own_group(ranks, self._like) if len(ranks) > 1 else None

    def sharding(self, names: Sequence[str], spread: Sequence[str]) -> Sharding:
        """Parameters sharded over the dimensions `names`; the model itself spreads some over the dimensions `spread`."""
        own = DeviceMesh.from_group(self.own(*names), self._mesh.device_type, mesh_dim_names=(names[0],))
        spread_mesh, stage_mesh = (self._spread_mesh(each, names, own) for each in (spread, [PIPELINE]))
        return Sharding(own, spread_mesh, stage_mesh, self(_REPLICAS, _CONTEXT))

    def _spread_mesh(self, spread: Sequence[str], names: Sequence[str], last: DeviceMesh) -> DeviceMesh:
        """A mesh of the dimensions `spread`, unless of one rank, and one of the ranks along `names`, as in the mesh `last`."""
        if _size(self._mesh, *spread) == 1:
            return last
        rows = [_ranks_along(self._mesh, names, at) for at in _ranks_along(self._mesh, spread)]
        ranks = torch.tensor(rows).unflatten(0, [_size(self._mesh, name) for name in spread])
        groups = [*(self.own(name) for name in spread), last.get_group()]
        return DeviceMesh.from_group(groups, self._mesh.device_type, ranks, mesh_dim_names=(*spread, names[0]))


def dimensions(mesh: DeviceMesh, known: Sequence[str] = _KNOWN) -> tuple[str, ...]:
    """The names of the mesh's dimensions. Raises `GraphPPError` for an unknown or missing name, and for ranks out of order."""
    option = "mesh" if known is _KNOWN else "parallel.expert_mesh"
    if not mesh.mesh_dim_names:
        raise GraphPPError(f"{option}: its dimensions have no names: give mesh_dim_names=({PIPELINE!r},) to init_device_mesh")
    for at, name in enumerate(mesh.mesh_dim_names):
        if name not in known:
            raise GraphPPError(f"{option}: unknown dimension {name!r}; there are {', '.join(map(repr, known))}")
        if name in _MODELS and bool((mesh.mesh.diff(dim=at) < 0).any()):
            raise GraphPPError(f"{option}: the ranks along {name!r} must ascend: torch's own collectives of a model sort them")
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
