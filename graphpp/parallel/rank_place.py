"""Where a rank stands: its device, the ranks of its pipeline, and the ranks that share its stages, layers or parameters.

Contract: plain data, made by `place.py` for a process group and by `mesh.py` for a `DeviceMesh`. None stands for a group in
which this rank would be alone.

On a mesh, the ranks of a group have this rank's coordinates but in these dimensions:

    group                    pp                        sharding.group           dp_shard, ep
    tensor                   tp                        sharding.copies          dp_replicate, cp
    model_parallel           pp, tp                    experts.group            ep
    peers                    cp, ep                    experts.replicas         dp_replicate, dp_shard, cp
    replicas                 dp_replicate, dp_shard,   experts.sharding.group   dp_shard
                             ep, cp                    experts.sharding.copies  dp_replicate, cp
    holders                  pp, tp, dp_shard, ep      everyone                 all
    twins                    replicas, or the copies of a sharding: the ranks with the same values of parameters
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp.parallel.agreement import Agreement


@dataclass(frozen=True)
class Sharding:
    """The ranks among which parameters are sharded.

    `mesh`: these ranks, in one dimension. `spread_mesh`: the same, after a dimension of the ranks over which the model spreads
    such parameters itself, if there are any: `tp`, or `ep` for experts, cuts a parameter first. `copies`: the replicas with the
    same shards as this rank (None: none). `holders`: the ranks which together hold the model once.
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
class SpreadExperts:
    """The ranks over which the experts of each layer are spread (expert parallelism); each trains on data of its own.

    `group`: these ranks. `replicas`: the ranks with this rank's experts and other data (None: none). `sharding`: among which
    ranks these experts are sharded (None: a rank has its experts whole). `holders`: the ranks which together hold the model
    once.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    sharding: Sharding | None
    holders: dist.ProcessGroup


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands: its device, and its process groups.

    `group`: of its pipeline (None: one process). `replicas`: of the ranks with the same stages and other data (None: none).
    `peers`: of the replicas with which the model itself may exchange values, along `cp` and `ep` (None: none). `layers`: None
    where no other rank shares the layers of its stages. `experts`: None where no other rank has other experts. `sharding`: of
    parameters that are no experts; None where each rank holds its parts of parameters whole. `mesh`: None where the caller gave
    none. `everyone`: all ranks that compile the model together (None: one process).
    """

    device: torch.device
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None
    peers: dist.ProcessGroup | None = None
    layers: SharedLayers | None = None
    experts: SpreadExperts | None = None
    sharding: Sharding | None = None
    mesh: DeviceMesh | None = None
    everyone: dist.ProcessGroup | None = None

    def agreement(self, group: dist.ProcessGroup | None) -> Agreement:
        """An agreement among the ranks of `group`, whose errors name ranks as `described` does."""
        return Agreement(group, self.device, self.described)

    def described(self, rank: int) -> str:
        """A rank of the world in an error: "rank 5", or "rank 5 (pp 1, tp 0)" with its coordinates on the mesh."""
        found = [] if self.mesh is None else (self.mesh.mesh == rank).nonzero().tolist()
        if self.mesh is None or not found:
            return f"rank {rank}"
        pairs = zip(self.mesh.mesh_dim_names or (), found[0], strict=True)
        return f"rank {rank} ({', '.join(f'{name} {at}' for name, at in pairs)})"

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups over which calls of a pipeline exchange values, each once."""
        found = [self.group, self.tensor, self.model_parallel, self.replicas, self.peers]
        experts = self.experts
        if experts is not None:
            found += [experts.group, experts.replicas, experts.holders]
        for each in (self.sharding, None if experts is None else experts.sharding):
            found += [] if each is None else [each.group, each.copies, each.holders]
        return tuple(dict.fromkeys(group for group in found if group is not None))

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks that share the layers of this rank's stages; None: there are no others."""
        return None if self.layers is None else self.layers.group

    @property
    def model_parallel(self) -> dist.ProcessGroup | None:
        """The ranks that compute the same microbatches, along the pipeline and `tp`; None for one process."""
        return self.group if self.layers is None else self.layers.pipelines

    @property
    def experts_group(self) -> dist.ProcessGroup | None:
        """The ranks over which experts are spread; None: there are no others."""
        return None if self.experts is None else self.experts.group

    @property
    def holders(self) -> dist.ProcessGroup | None:
        """The ranks that together hold the model once; None for one process."""
        if self.sharding is not None:
            return self.sharding.holders
        return self.model_parallel if self.experts is None else self.experts.holders

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
        if self.sharding is not None:
            return self.sharding.copies
        return self.replicas if self.experts is None else self.experts.replicas

    @property
    def writes_files(self) -> bool:
        """Whether this rank writes files for its twins."""
        return self.twins is None or dist.get_rank(self.twins) == 0

    @property
    def first_of_stage(self) -> bool:
        """Whether this rank has the first parts of the parameters of its stages."""
        several = (self.tensor, self.experts_group, None if self.sharding is None else self.sharding.group)
        return all(group is None or dist.get_rank(group) == 0 for group in several)

    @property
    def first_holder(self) -> bool:
        """Whether this rank is the first one of its pipeline and has the first parts of parameters."""
        return self.rank == 0 and self.first_of_stage
