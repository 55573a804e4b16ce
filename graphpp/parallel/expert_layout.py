"""The ranks of `mesh=` beside those of `parallel.expert_mesh`, which places experts on another factorisation of the same ranks.

Contract:
- Both meshes have the same ranks at each position along `pp`. Within these ranks, attention has the dimensions `dp_replicate`,
  `dp_shard`, `cp` and `tp`, and experts have `dp_replicate`, `dp_shard`, `ep` and `etp` (parallel folding, arXiv 2504.14960).
- Ranks that have the same parameters, experts and others, form a class. A copy of the model is a set of ranks that both meshes
  close: with a rank it has all ranks along `pp`, `tp`, `ep`, `etp` and both `dp_shard`. Each copy must have one rank of each
  class, and the first copy the first rank of each, so that one copy writes files. Other meshes raise `GraphPPError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp.errors import GraphPPError

_SHARDS = "dp_shard"


class ExpertLayout(NamedTuple):
    """World ranks. `exchanging`: the replicas with which the model may exchange values, this rank included. `same`: the ranks
    with the same parameters. `model`: the copy of the model with this rank, in the order of the classes. `tp_adds_to_experts`:
    whether ranks along `tp` add to the gradient of the same expert, so that each of them must send other tokens."""

    exchanging: list[int]
    same: list[int]
    model: list[int]
    tp_adds_to_experts: bool


def expert_layout(mesh: DeviceMesh, experts: DeviceMesh) -> ExpertLayout:
    """The layout of two meshes with known dimensions. Raises `GraphPPError` if they do not fit each other."""
    _check_dimensions(mesh, experts)
    same = _in_both(_connected((mesh, ("dp_replicate", "cp"))), _connected((experts, ("dp_replicate",))))
    model = _connected((mesh, ("pp", "tp", _SHARDS)), (experts, ("ep", "etp", _SHARDS)))
    _check_nested(mesh, same, model)
    exchanging = _connected((mesh, ("tp", "cp")), (experts, ("ep", "etp")))
    own, replicas = dist.get_rank(), _connected((mesh, ("dp_replicate", _SHARDS, "cp")))
    of_expert = _connected((experts, ("dp_replicate", _SHARDS, "ep")))
    adds = len(_members(_in_both(of_expert, _connected((mesh, ("tp",)))), own)) > 1
    in_order = sorted(_members(model, own), key=lambda rank: int(same[rank]))
    return ExpertLayout(_members(_in_both(exchanging, replicas), own), _members(same, own), in_order, adds)


def _check_dimensions(mesh: DeviceMesh, experts: DeviceMesh) -> None:
    names, of_experts = mesh.mesh_dim_names or (), experts.mesh_dim_names or ()
    if "ep" in names:
        raise GraphPPError("mesh: it has the dimension 'ep', and parallel.expert_mesh places experts: leave one of them out")
    if (_SHARDS in names) != (_SHARDS in of_experts):
        raise GraphPPError(
            "parallel.expert_mesh: experts are sharded if other parameters are: give mesh= and the expert mesh the dimension "
            "dp_shard, of size 1 where nothing is to be cut, or neither of them"
        )
    if "ep" not in of_experts:
        raise GraphPPError("parallel.expert_mesh: it lacks the dimension 'ep': add it, of size 1 if each rank has all experts")
    if "etp" in of_experts[: of_experts.index("ep")]:
        raise GraphPPError("parallel.expert_mesh: 'ep' must stand before 'etp', as in the placements of the experts")
    for name, each in (("mesh", mesh), ("parallel.expert_mesh", experts)):
        if bool((_lines(each, [_SHARDS]).diff(dim=1) < 0).any()):
            raise GraphPPError(f"{name}: the ranks along {_SHARDS!r} must ascend, so that one copy of the model writes files")
    one, other = (_connected((each, [name for name in each.mesh_dim_names or () if name != "pp"])) for each in (mesh, experts))
    if not torch.equal(one, other):
        raise GraphPPError(
            f"parallel.expert_mesh: its ranks along all dimensions but pp, {experts.mesh.tolist()}, must be those of mesh=, "
            f"{mesh.mesh.tolist()}: give both meshes the same pp, and products of the other sizes that are equal"
        )


def _check_nested(mesh: DeviceMesh, same: torch.Tensor, model: torch.Tensor) -> None:
    ranks = mesh.mesh.flatten()
    if len(_in_both(same, model)[ranks].unique()) < len(ranks) or bool((model[same[ranks]] != model[ranks.min()]).any()):
        raise GraphPPError(
            "parallel.expert_mesh: the ranks of one copy of the experts and those of one copy of the other parameters cross: "
            "order the dimensions of both meshes so that dp_replicate (and cp) stands before dp_shard, ep, etp and tp"
        )


def _connected(*along: tuple[DeviceMesh, Sequence[str]]) -> torch.Tensor:
    """By world rank, the lowest rank that can be reached along the dimensions; -1 for a rank of no mesh."""
    label = torch.full((1 + max(int(mesh.mesh.max()) for mesh, _ in along),), -1)
    for mesh, _ in along:
        label[mesh.mesh.flatten()] = mesh.mesh.flatten().to(label.dtype)
    lines = [_lines(mesh, names) for mesh, names in along]
    before = None
    while before is None or not torch.equal(label, before):
        before = label.clone()
        for each in lines:
            label[each] = label[each].amin(1, keepdim=True).expand_as(each)
    return label


def _lines(mesh: DeviceMesh, names: Sequence[str]) -> torch.Tensor:
    """The world ranks [positions along other dimensions, positions along these dimensions]."""
    given = mesh.mesh_dim_names or ()
    others, own = ([at for at, name in enumerate(given) if (name in names) is wanted] for wanted in (False, True))
    return mesh.mesh.permute(*others, *own).reshape(-1, prod(mesh.size(at) for at in own)).long()


def _in_both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """By world rank, the lowest rank with the same labels in both."""
    pairs = one * len(other) + other
    _, number = pairs.unique(return_inverse=True)
    lowest = torch.full((int(number.max()) + 1,), len(pairs)).scatter_reduce(0, number, torch.arange(len(pairs)), "amin")
    return lowest[number]


def _members(label: torch.Tensor, rank: int) -> list[int]:
    """The world ranks with the label of a rank, ascending."""
    found: list[int] = (label == label[rank]).nonzero().flatten().tolist()
    return found
