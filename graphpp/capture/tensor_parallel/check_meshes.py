"""Check that a model is sharded over the ranks of `mesh=`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from graphpp.errors import CaptureError
from graphpp.runtime.dtensors import spread_tensor


def check_meshes(
    model: nn.Module, layers: dist.ProcessGroup | None, experts: dist.ProcessGroup | None, names: Sequence[str] = ("ep",)
) -> None:
    """Raise `CaptureError` for a `DTensor` over other ranks than `tp` or `ep` of `mesh=` (or `ep`, `etp` of the expert mesh).

    `layers`: the group along `tp`; `experts`: along the dimensions `names`, over which experts are spread; None: this rank
    alone. Also refuses `Partial` placements, and tensors that are replicated over `ep`.
    """
    along = {"tp": _ranks(layers), "ep": _ranks(experts)}
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        part = spread_tensor(tensor)
        if part is None:
            continue
        mesh, placements = part.spread.mesh, part.spread.placements
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim == len(names) and ranks == along["ep"] and (mesh.ndim > 1 or ranks != along["tp"]):
            if placements[0].is_replicate() and len(ranks) > 1:
                raise CaptureError(
                    f"{fqn} is a DTensor that all ranks along ep have whole, and each of them computes a gradient from its own "
                    "data: leave it a plain parameter, whose gradients are averaged over ep"
                )
        elif mesh.ndim != 1 or ranks != along["tp"]:
            raise CaptureError(f"{fqn} is a DTensor over {mesh}, {_remedy(layers, experts, mesh.ndim, names)}")
        if any(placement.is_partial() for placement in placements):
            raise CaptureError(f"{fqn} is a DTensor with placements {placements}: redistribute the values before")


def _remedy(layers: dist.ProcessGroup | None, experts: dist.ProcessGroup | None, ndim: int, names: Sequence[str]) -> str:
    """Why a `DTensor` is over the wrong ranks. `ndim`: of its mesh."""
    if len(names) > 1:
        return (
            "and experts on this parallel.expert_mesh are spread over ep and etp together: distribute the parameter over "
            'expert_mesh["ep", "etp"], with the placement Replicate() along etp if these ranks have it whole'
        )
    if ndim > 1:
        return f"of {ndim} dimensions: spread a parameter over tp or over ep alone"
    known = [(name, group) for name, group in (("tp", layers), ("ep", experts)) if group is not None]
    has = " and ".join(f"has the ranks {_ranks(group)} along {name}" for name, group in known)
    return (
        f"and mesh= of graphpp.compile {has or 'has no dimension tp or ep of several ranks'}. Give mesh= a dimension "
        "tp (or ep, for experts), and parallelize_module this dimension of the same mesh: parallelize_module(model, "
        'mesh["tp"], plan). Parameters that are sharded over data ranks (fully_shard) are given whole: a dimension '
        "dp_shard of mesh= shards them."
    )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)
