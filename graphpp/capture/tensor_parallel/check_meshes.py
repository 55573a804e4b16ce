"""Check that a model is sharded over the ranks of `mesh=`."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from graphpp.errors import CaptureError
from graphpp.runtime.dtensors import spread_tensor


def check_meshes(model: nn.Module, layers: dist.ProcessGroup | None, experts: dist.ProcessGroup | None) -> None:
    """Raise `CaptureError` for a `DTensor` over other ranks than `tp` or `ep` of `mesh=`.

    `layers`, `experts`: the groups along `tp` and `ep`; None: this rank alone. Also refuses `Partial` placements, and
    tensors that are replicated over `ep`.
    """
    along = {"tp": _ranks(layers), "ep": _ranks(experts)}
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        part = spread_tensor(tensor)
        if part is None:
            continue
        mesh, placements = part.spread.mesh, part.spread.placements
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or ranks not in along.values():
            known = [name for name, group in (("tp", layers), ("ep", experts)) if group is not None]
            has = " and ".join(f"has the ranks {along[name]} along {name}" for name in known)
            has = has or "has no dimension tp or ep of several ranks"
            if mesh.ndim > 1:
                raise CaptureError(
                    f"{fqn} is a DTensor over {mesh}, of {mesh.ndim} dimensions: spread a parameter over tp or over ep alone"
                )
            raise CaptureError(
                f"{fqn} is a DTensor over {mesh}, and mesh= of graphpp.compile {has}. Give mesh= a dimension "
                "tp (or ep, for experts), and parallelize_module this dimension of the same mesh: parallelize_module(model, "
                'mesh["tp"], plan). Parameters that are sharded over data ranks (fully_shard) are given whole: a dimension '
                "dp_shard of mesh= shards them."
            )
        if part.is_whole and len(ranks) > 1 and ranks == along["ep"]:
            raise CaptureError(
                f"{fqn} is a DTensor that all ranks along ep have whole, and each of them computes a gradient from its own "
                "data: leave it a plain parameter, whose gradients are averaged over ep"
            )
        if any(placement.is_partial() for placement in placements):
            raise CaptureError(f"{fqn} is a DTensor with placements {placements}: redistribute the values before")


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)
