"""Makes the `RankPlace` of a rank: its device, the ranks of its pipeline, and the ranks that train its stages on other data.

Contract:
- `mesh=` is a `DeviceMesh` (dimensions: `mesh.py`), a process group of the pipeline's ranks, or None: the world, which is
  initialised here if it is not yet, and torchrun's variables are set.
- All ranks agree in a `RankTree`, which needs no group of all ranks, and then make the groups of the mesh's dimensions.
- The device is `parallel.device`, else the mesh's type, else the model's GPU, else torchrun's local rank, else the CPU.
- Raises `GraphPPError` if a rank lacks the device, is not in the mesh or group, or the mesh has other dimensions; then
  `MismatchError` on all other ranks of the mesh, and if ranks were given different meshes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from graphpp.arguments import type_name
from graphpp.errors import GraphPPError
from graphpp.log import logger
from graphpp.parallel.agreement import Agreement, Round
from graphpp.parallel.facts import Facts
from graphpp.parallel.groups import group_among
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.parallel.mesh import described, dimensions, layout_of_experts, pipeline_size, place_in, shard_size
from graphpp.parallel.rank_place import RankPlace
from graphpp.parallel.rank_tree import RankTree

_LOG = logger(__name__)

MeshLike = DeviceMesh | dist.ProcessGroup | None


def place_of(
    model: object,
    mesh: MeshLike,
    device: torch.device | None,
    timeout: float | None = None,
    *,
    shards_alone: bool = False,
    expert_mesh: DeviceMesh | None = None,
) -> RankPlace:
    """The place of this rank. Raises `GraphPPError`.

    `timeout`: seconds, of a world group made here. `shards_alone`: a single rank along `dp_shard` too has a shard, of all rows.
    `expert_mesh`: the same ranks in other dimensions, over which the experts are spread.
    """
    if isinstance(mesh, DeviceMesh):
        return _in_mesh(model, mesh, device, 1 if shards_alone else 2, expert_mesh)
    if expert_mesh is not None:
        raise GraphPPError("parallel.expert_mesh: it places experts on the ranks of a mesh: give mesh= a DeviceMesh too")
    _check_group(mesh)
    found = usable_device(device if device is not None else _default_device(model))
    given = mesh if mesh is not None else _world(found, timeout)
    if given is None:
        return RankPlace(found, None)
    ranks = dist.get_process_group_ranks(given)
    everyone = _everyone(ranks, given)
    with FailureBoard((everyone,), "mesh").watching():
        with Round(Agreement(everyone, found)) as r:
            r.compare(Facts({"mesh=": [f"a group of the ranks {ranks}"]}))
        return RankPlace(found, group_among(ranks, given), everyone=everyone)


def planned_mesh(
    model: object, sizes: Mapping[str, int], device: torch.device | None, timeout: float | None = None
) -> DeviceMesh | None:
    """A mesh with these dimensions over all ranks of the job; None in one process without a process group.

    Raises `GraphPPError` if the job has another number of ranks, if the model must be spread over the mesh first, and if one
    process would need a process group. `timeout`: as for `place_of`.
    """
    spread = [name for name in ("tp", "ep", "cp") if sizes.get(name, 1) > 1]
    if spread:
        raise GraphPPError(
            f"plan: it has {' and '.join(spread)}: make a mesh of {_shape(sizes)}, spread the model over it (docs/meshes.md), "
            "and give mesh="
        )
    found = usable_device(device if device is not None else _default_device(model))
    world = _world(found, timeout)
    ranks, wanted = (1 if world is None else dist.get_world_size(world)), prod(sizes.values())
    if ranks != wanted:
        raise GraphPPError(
            f"plan: it is for {wanted} ranks ({_shape(sizes)}), and this job has {ranks}: start as many, or give mesh="
        )
    if world is None and "dp_shard" in sizes:
        raise GraphPPError(
            "plan: parameters have a dtype of their own in shards, which needs a process group, of one rank too: start the "
            "program by torchrun, or plan with param_dtype=None"
        )
    return None if world is None else init_device_mesh(found.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_planned(mesh: MeshLike, sizes: Mapping[str, int]) -> None:
    """Raise `GraphPPError` if the sizes of a mesh differ from a plan's; dimensions of one rank are ignored."""
    if isinstance(mesh, DeviceMesh):
        found = dict(zip(dimensions(mesh), mesh.shape, strict=True))
    else:
        found = {"pp": pipeline_ranks(mesh) or 1}
    own, planned = ({name: size for name, size in each.items() if size > 1} for each in (found, sizes))
    if own != planned:
        raise GraphPPError(f"mesh: it is {_shape(found)}, and plan= is for {_shape(sizes)}: give a mesh of these sizes")


def check_planned_experts(mesh: DeviceMesh | None, sizes: Mapping[str, int] | None) -> None:
    """Raise `GraphPPError` if a plan has a mesh of experts, and the given one is another."""
    found = None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    own, planned = ({name: size for name, size in (each or {}).items() if size > 1} for each in (found, sizes))
    if own != planned:
        wanted = "none" if sizes is None else f"parallel=graphpp.Parallel(expert_mesh=..) of {_shape(sizes)}"
        raise GraphPPError(f"parallel.expert_mesh: it is {_shape(found) if found else 'not given'}, and plan= takes {wanted}")


def _shape(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _check_group(mesh: object) -> None:
    """Raise if `mesh` is no process group; for ranks outside of a new group torch returns a number in place of the group."""
    outside = mesh is dist.GroupMember.NON_GROUP_MEMBER or (type(mesh) is int and mesh == dist.GroupMember.NON_GROUP_MEMBER)
    if not (outside or mesh is None or isinstance(mesh, dist.ProcessGroup)):
        raise GraphPPError(f"mesh: take a DeviceMesh, a ProcessGroup, or None, got {type_name(mesh)}")
    if outside or (mesh is not None and dist.get_rank(mesh) < 0):  # type: ignore[arg-type]
        raise GraphPPError(f"mesh: rank {dist.get_rank()} is not in the group: call compile on the ranks of its group only")


def pipeline_ranks(mesh: MeshLike) -> int | None:
    """The number of ranks of a pipeline; None if `mesh` does not give it."""
    if isinstance(mesh, DeviceMesh):
        return pipeline_size(mesh)
    _check_group(mesh)
    return None if mesh is None else dist.get_world_size(mesh)


def shard_ranks(mesh: MeshLike) -> int | None:
    """The number of ranks over which parameters are sharded; None if they are not sharded."""
    ranks = shard_size(mesh) if isinstance(mesh, DeviceMesh) else 1
    return ranks if ranks > 1 else None


def _in_mesh(
    model: object, mesh: DeviceMesh, device: torch.device | None, least_shards: int, expert_mesh: DeviceMesh | None
) -> RankPlace:
    """All ranks compare the mesh before groups are made: with different meshes the ranks would hang in different groups."""
    if mesh.get_coordinate() is None:
        raise GraphPPError(f"mesh: rank {dist.get_rank()} is not in the mesh: call compile on the ranks of the mesh only")

    everyone = _everyone(sorted(mesh.mesh.flatten().tolist()), mesh.get_group() if mesh.ndim == 1 else None)
    with FailureBoard((everyone,), "mesh").watching():
        with Round(Agreement(everyone, torch.device(mesh.device_type))) as r:
            found = _device_on(model, mesh, device)
            if expert_mesh is not None:
                layout_of_experts(mesh, expert_mesh)
            meshes = {"mesh=": mesh, "parallel.expert_mesh": expert_mesh}
            r.compare(Facts({name: ["none" if each is None else described(each)] for name, each in meshes.items()}))
        return place_in(mesh, everyone, found, least_shards, expert_mesh)


def _everyone(ranks: Sequence[int], given: dist.ProcessGroup | None) -> RankTree | None:
    """All ranks that compile together; None if this rank is alone. `given`: the caller's group of them, if there is one."""
    like = given or dist.group.WORLD
    assert like is not None
    with FailureBoard((RankTree(tuple(ranks), (like,), len(ranks)),), "mesh").watching():
        return RankTree.made(ranks, like) if len(ranks) > 1 else None


def _device_on(model: object, mesh: DeviceMesh, device: torch.device | None) -> torch.device:
    dimensions(mesh)
    found = usable_device(device if device is not None else _default_device(model, mesh.device_type))
    if found.type != mesh.device_type:
        raise GraphPPError(
            f"mesh: its ranks exchange tensors on {mesh.device_type}, but this rank runs on {found}: make the mesh for "
            f"{found.type}, or give parallel=graphpp.Parallel(device=...)"
        )
    return found


def usable_device(wanted: torch.device) -> torch.device:
    """The device with its index, made the current one. Raises `GraphPPError` if this machine lacks the device."""
    try:
        torch.empty(0, device=wanted)
        if wanted.type == "cuda":
            wanted = torch.device("cuda", torch.cuda.current_device()) if wanted.index is None else wanted
            torch.cuda.set_device(wanted)
    except (RuntimeError, AssertionError, ImportError) as error:
        first = str(error).partition("\n")[0]
        raise GraphPPError(f"parallel.device: {str(wanted)!r} cannot be used on this machine: {first}") from error
    return torch.device("cpu") if wanted.type == "cpu" else wanted  # a tensor's device has no index there


def _default_device(model: object, type_of_mesh: str | None = None) -> torch.device:
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
    """The world group, initialised from torchrun's variables if needed; None for one process."""
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        _initialise("nccl" if device.type == "cuda" else "gloo", timeout)  # gloo would connect all pairs of ranks
    return dist.group.WORLD


def _initialise(backend: str, timeout: float | None) -> None:
    """Make the world group. After a torchrun restart, use new names: the store still has the addresses of ended processes.

    https://github.com/pytorch/pytorch/issues/135712. Ranks of several machines may see different restart counts, so they keep
    the names, and log the remedy.
    """
    seconds = None if timeout is None else timedelta(seconds=timeout)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if again != "0" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        store, rank, ranks = next(rendezvous("env://") if seconds is None else rendezvous("env://", timeout=seconds))
        fresh = PrefixStore(f"start {again}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=ranks, timeout=seconds)
        return
    if again != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _LOG.warning(
            "torchrun has started the ranks of several machines again over the store of the start before. There they may find "
            "the addresses of processes that are gone, and wait. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun "
            "(https://github.com/pytorch/pytorch/issues/135712)"
        )
    dist.init_process_group(backend, timeout=seconds)
