"""Check that a model is spread over the ranks that `mesh=` gives for it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from graphpp.errors import CaptureError
from graphpp.runtime.shards.layer_parts import layer_part


def check_meshes(model: nn.Module, layers: dist.ProcessGroup | None) -> None:
    """Raise `CaptureError` for a `DTensor` parameter or buffer over other ranks than those of `layers`, along `tp`.

    `layers`: the ranks that share each layer with this rank; None where `mesh=` has no dimension `tp` of several ranks. Raises
    also for placements whose values no rank has (`Partial`).
    """
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        part = layer_part(tensor)
        if part is None:
            continue
        mesh, placements = part.spread.mesh, part.spread.placements
        ranks = [dist.get_rank()] if layers is None else dist.get_process_group_ranks(layers)
        if mesh.mesh.flatten().tolist() != ranks or mesh.ndim != 1:
            along = "has no dimension tp" if layers is None else f"has the ranks {ranks} along tp"
            raise CaptureError(
                f"{fqn} is a DTensor over {mesh}, and mesh= of graphpp.compile {along}. Give mesh= a dimension tp, and "
                'parallelize_module this dimension of the same mesh: parallelize_module(model, mesh["tp"], plan). Parameters '
                "that are sharded over data ranks (fully_shard) are given whole: a dimension dp_shard of mesh= shards them."
            )
        if any(placement.is_partial() for placement in placements):
            raise CaptureError(f"{fqn} is a DTensor with placements {placements}: redistribute the values before")
