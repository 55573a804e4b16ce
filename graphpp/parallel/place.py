"""Where a rank of a pipeline stands: its device, the ranks of its pipeline, and the ranks that train its stages on other data.

Contract
    `mesh=` is a `DeviceMesh` with the dimensions `pp` (the ranks of a pipeline), `dp_replicate` and `dp_shard` (data
    parallelism, with whole parameters and with a shard of each parameter on each rank), `cp` (context parallelism: the ranks
    that share each sequence) and `tp` (tensor parallelism: the ranks that share each layer), a process group of the pipeline's
    ranks, or None: the world, which is initialised if torchrun's variables are set and nobody has.
    Ranks that differ in `dp_replicate`, `dp_shard` and `cp` alone train the same stages on other tokens: they are replicas.
    The device is `parallel.device`, else the mesh's type, else the model's GPU, else torchrun's local rank, else the CPU.
    `GraphPPError` where a rank has no such device, is not in the mesh or group, or where the mesh has other dimensions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from graphpp._torch.distributed import group_of
from graphpp.arguments import type_name
from graphpp.errors import GraphPPError

_LOG = logging.getLogger("graphpp")

MeshLike = DeviceMesh | dist.ProcessGroup | None

_PIPELINE, _REPLICAS, _SHARDS, _CONTEXT, _TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
_KNOWN = (_PIPELINE, _REPLICAS, _SHARDS, _CONTEXT, _TENSOR)
_PLANNED = ("ep",)
_DATA = (_REPLICAS, _SHARDS, _CONTEXT)  # the dimensions along which ranks train the same stages on other tokens


@dataclass(frozen=True)
class Sharding:
    """The ranks among which the parameters of a stage are sharded.

    `mesh`: these ranks, in one dimension. `spread_mesh`: the same, after a dimension of the ranks that share layers, if there
    are any: `tp` cuts a parameter first. `copies`: the replicas with the same shards as this rank (None: none). `holders`: the
    ranks along the pipeline, `tp` and `mesh`, which together hold the model once.
    """

    mesh: DeviceMesh
    spread_mesh: DeviceMesh
    copies: dist.ProcessGroup | None
    holders: dist.ProcessGroup

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks of `mesh`."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's place in `mesh`, which is the number of its shards."""
        return self.mesh.get_local_rank()

    @property
    def ranks(self) -> int:
        """Into how many shards parameters are cut."""
        return self.mesh.size()


@dataclass(frozen=True)
class SharedLayers:
    """The ranks that share each layer (tensor parallelism).

    `group`: those that share this rank's layers. `pipelines`: all ranks of their pipelines, which compute the same
    microbatches.
    """

    group: dist.ProcessGroup
    pipelines: dist.ProcessGroup


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands: its device, and its process groups.

    `group`: of its pipeline (None: one process). `replicas`: of the ranks with the same stages and other data (None: none).
    `context`: those of the replicas that share sequences with this rank (None: none). `layers`: None where no other rank shares
    the layers of its stages. `sharding`: None where each rank holds its parts of parameters whole.
    """

    device: torch.device
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    layers: SharedLayers | None = None
    sharding: Sharding | None = None

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks that share the layers of this rank's stages; None: there are no others."""
        return None if self.layers is None else self.layers.group

    @property
    def model_parallel(self) -> dist.ProcessGroup | None:
        """The ranks that compute the same microbatches, along the pipeline and `tp`; None for one process."""
        return self.group if self.layers is None else self.layers.pipelines

    @property
    def holders(self) -> dist.ProcessGroup | None:
        """The ranks that together hold the model once; None for one process."""
        return self.model_parallel if self.sharding is None else self.sharding.holders

    @property
    def rank(self) -> int:
        """This process's rank within the pipeline."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def ranks(self) -> int:
        """Ranks in the pipeline."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def shards(self) -> int | None:
        """Into how many shards parameters are cut; None: each rank holds the whole parameters of its stages."""
        return None if self.sharding is None else self.sharding.ranks

    @property
    def twins(self) -> dist.ProcessGroup | None:
        """The ranks with the same parameters as this one; None: there are no others."""
        return self.replicas if self.sharding is None else self.sharding.copies

    @property
    def writes_files(self) -> bool:
        """Whether this rank writes files for its twins."""
        return self.twins is None or dist.get_rank(self.twins) == 0

    @property
    def first_of_stage(self) -> bool:
        """Whether this rank has the first parts of the parameters of its stages."""
        shares_layers = self.layers is not None and dist.get_rank(self.layers.group) > 0
        return not shares_layers and (self.sharding is None or self.sharding.rank == 0)

    @property
    def first_holder(self) -> bool:
        """Whether this rank is the first one of its pipeline and has the first parts of parameters."""
        return self.rank == 0 and self.first_of_stage


def place_of(
    model: object,
    mesh: MeshLike,
    device: torch.device | None,
    timeout: float | None = None,
    *,
    shards_alone: bool = False,
) -> RankPlace:
    """The place of this rank. Raises `GraphPPError`.

    `timeout`: seconds, of the world's process group if it is made here. `shards_alone`: whether one rank along `dp_shard` has
    a shard too, of all rows.
    """
    if isinstance(mesh, DeviceMesh):
        return _in_mesh(model, mesh, device, 1 if shards_alone else 2)
    _check_group(mesh)
    if mesh is not None and dist.get_rank(mesh) < 0:
        raise GraphPPError(f"mesh: rank {dist.get_rank()} is not in the group: call compile on the ranks of its group only")
    found = _device(model, device)
    return RankPlace(found, mesh if mesh is not None else _world(found, timeout))


def _check_group(mesh: object) -> None:
    """Raise where `mesh` is no process group; torch gives ranks outside of a new group a number in its place."""
    if mesh is dist.GroupMember.NON_GROUP_MEMBER or (type(mesh) is int and mesh == dist.GroupMember.NON_GROUP_MEMBER):
        raise GraphPPError(f"mesh: rank {dist.get_rank()} is not in the group: call compile on the ranks of its group only")
    if mesh is not None and not isinstance(mesh, dist.ProcessGroup):
        raise GraphPPError(f"mesh: take a DeviceMesh, a ProcessGroup, or None, got {type_name(mesh)}")


def pipeline_ranks(mesh: MeshLike) -> int | None:
    """The number of ranks of a pipeline; None: `mesh` does not say."""
    if isinstance(mesh, DeviceMesh):
        names = _names(mesh)
        return mesh.size(names.index(_PIPELINE)) if _PIPELINE in names else 1
    _check_group(mesh)
    return None if mesh is None else dist.get_world_size(mesh)


def shard_ranks(mesh: MeshLike) -> int | None:
    """The number of ranks over which parameters are sharded; None: they are not."""
    ranks = _size(mesh, _SHARDS) if isinstance(mesh, DeviceMesh) else 1
    return ranks if ranks > 1 else None


def _in_mesh(model: object, mesh: DeviceMesh, device: torch.device | None, least_shards: int) -> RankPlace:
    names = _names(mesh)
    if mesh.get_coordinate() is None:
        raise GraphPPError(f"mesh: rank {dist.get_rank()} is not in the mesh: call compile on the ranks of the mesh only")
    found = _device(model, device, mesh.device_type)
    if found.type != mesh.device_type:
        raise GraphPPError(
            f"mesh: its ranks exchange tensors on {mesh.device_type}, but this rank runs on {found}: make the mesh for "
            f"{found.type}, or give parallel=graphpp.Parallel(device=...)"
        )
    data = [name for name in _DATA if name in names]
    return RankPlace(
        found,
        _along(mesh, _PIPELINE),
        _along(mesh, *data),
        _along(mesh, _CONTEXT),
        _shared_layers(mesh) if _size(mesh, _TENSOR) > 1 else None,
        _sharding(mesh, data) if _SHARDS in names and _size(mesh, _SHARDS) >= least_shards else None,
    )


def _shared_layers(mesh: DeviceMesh) -> SharedLayers:
    pipelines = _along(mesh, _PIPELINE, _TENSOR)
    assert pipelines is not None, "a mesh with shared layers has ranks that share them"
    return SharedLayers(mesh.get_group(_TENSOR), pipelines)


def _sharding(mesh: DeviceMesh, data: Sequence[str]) -> Sharding:
    others = [name for name in data if name != _SHARDS and _size(mesh, name) > 1]
    holders = _along(mesh, _PIPELINE, _TENSOR, _SHARDS)
    assert holders is not None, "a mesh with shards has ranks that hold them"
    made = Sharding(mesh[_SHARDS], _spread_mesh(mesh), _along(mesh, *others), holders)
    if dist.get_rank(made.group) != made.rank:
        raise GraphPPError(f"mesh: the ranks along {_SHARDS!r} must ascend, as init_device_mesh lays them out")
    return made


def _spread_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if _size(mesh, _TENSOR) == 1:
        return mesh[_SHARDS]
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None and coordinates is not None
    pairs = zip(names, coordinates, strict=True)
    ranks = mesh.mesh[tuple(slice(None) if name in (_TENSOR, _SHARDS) else at for name, at in pairs)]
    ordered = ranks if names.index(_TENSOR) < names.index(_SHARDS) else ranks.T
    groups = [mesh.get_group(_TENSOR), mesh.get_group(_SHARDS)]
    return DeviceMesh.from_group(groups, mesh.device_type, ordered, mesh_dim_names=(_TENSOR, _SHARDS))


def _size(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def _along(mesh: DeviceMesh, *names: str) -> dist.ProcessGroup | None:
    """The process group of the ranks that have this rank's coordinates in all other dimensions; None if the mesh has none."""
    there = [name for name in names if name in (mesh.mesh_dim_names or ())]
    if len(there) < 2:
        return mesh.get_group(there[0]) if there else None
    return group_of(_ranks_along(mesh, there))


def _ranks_along(mesh: DeviceMesh, names: Sequence[str]) -> list[int]:
    """The ranks of the world that have this rank's coordinates in all other dimensions, ascending."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None and mesh.mesh_dim_names is not None
    pairs = zip(mesh.mesh_dim_names, coordinates, strict=True)
    found = mesh.mesh[tuple(slice(None) if name in names else at for name, at in pairs)]
    return sorted(found.flatten().tolist())


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh's dimensions, if graphpp knows them all."""
    if not mesh.mesh_dim_names:
        raise GraphPPError(f"mesh: its dimensions have no names: give mesh_dim_names=({_PIPELINE!r},) to init_device_mesh")
    there = "there are " + ", ".join(map(repr, _KNOWN))
    for name in mesh.mesh_dim_names:
        if name in _PLANNED:
            raise GraphPPError(f"mesh: the dimension {name!r} is not there yet; {there}")
        if name not in _KNOWN:
            raise GraphPPError(f"mesh: unknown dimension {name!r}; {there}")
    return tuple(mesh.mesh_dim_names)


def _device(model: object, device: torch.device | None, type_of_mesh: str | None = None) -> torch.device:
    """The device of this rank, with its number. Raises `GraphPPError` where the machine has none such."""
    wanted = device if device is not None else _default_device(model, type_of_mesh)
    try:
        return _usable(wanted)
    except (RuntimeError, AssertionError, ImportError) as error:
        first = str(error).partition("\n")[0]
        raise GraphPPError(f"parallel.device: {str(wanted)!r} cannot be used on this machine: {first}") from error


def _usable(device: torch.device) -> torch.device:
    """The device with its number, made the current one; raises torch's error where there is none."""
    torch.empty(0, device=device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        torch.cuda.set_device(device)
    return device


def _default_device(model: object, type_of_mesh: str | None) -> torch.device:
    if type_of_mesh == "cpu":
        return torch.device("cpu")
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None and first.device.type == "cuda":
        return first.device
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _world(device: torch.device, timeout: float | None) -> dist.ProcessGroup | None:
    """The world group, initialised from torchrun's variables if nobody has; None for one process."""
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        seconds = None if timeout is None else timedelta(seconds=timeout)
        if _started_again() and _on_one_machine():
            store, rank, ranks = next(rendezvous("env://") if seconds is None else rendezvous("env://", timeout=seconds))
            # https://github.com/pytorch/pytorch/issues/135712
            fresh = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            dist.init_process_group(backend, store=fresh, rank=rank, world_size=ranks, timeout=seconds)
        else:
            if _started_again() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                _LOG.warning(
                    "torchrun has started the ranks of several machines again over the store of the start before. There "
                    "they may find the addresses of processes that are gone, and wait. Set "
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun (https://github.com/pytorch/pytorch/issues/135712)"
                )
            dist.init_process_group(backend, timeout=seconds)
    return dist.group.WORLD


def _started_again() -> bool:
    """Whether torchrun has started the ranks again; the store may still have the addresses of the ranks of before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _on_one_machine() -> bool:
    """Whether one agent of torchrun has started all ranks, so that they see the same count of starts."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
