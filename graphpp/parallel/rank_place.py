"""`RankPlace`: a rank's device and process groups, made by `place.py` for a process group and by `mesh.py` for a `DeviceMesh`.

None stands for a group in which this rank would be alone. On a mesh, a group's ranks differ in these dimensions only:

    group                    pp                        sharding.group           dp_shard, ep
    tp_group                 tp                        sharding.copies          dp_replicate, cp
    model_parallel           pp, tp                    experts.group            ep
    cp_ep_group              cp, ep                    experts.replicas         dp_replicate, dp_shard, cp
    replicas                 dp_replicate, dp_shard,   experts.sharding.group   dp_shard
                             ep, cp                    experts.sharding.copies  dp_replicate, cp
    whole_model (ranks)      pp, tp, dp_shard, ep      everyone (tree)          all
    same_parameters          replicas, or the copies of a sharding

With `parallel.expert_mesh` the groups of `experts` are along dimensions of that mesh: `experts.group` along ep and etp,
`experts.replicas` along dp_replicate and dp_shard. `expert_layout.py` has `cp_ep_group`, `same_parameters` and `whole_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphpp.parallel.agreement import Agreement
from graphpp.parallel.rank_tree import Ranks, RankTree


@dataclass(frozen=True)
class Sharding:
    """The ranks among which parameters are sharded.

    `mesh`: these ranks, in one dimension. `spread_mesh`: `mesh`, after the dimension over which the model itself spreads such
    parameters, if there is one: `tp`, or `ep` for experts, cuts a parameter first. `stage_mesh`: `mesh`, after the ranks of the
    pipeline, over which `memory.word_parts` cuts a parameter first. `copies`: the replicas with the same shards
    as this rank (None: none).
    """

    mesh: DeviceMesh
    spread_mesh: DeviceMesh
    stage_mesh: DeviceMesh
    copies: dist.ProcessGroup | None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's position in `mesh`, which is the number of its shards."""
        return self.mesh.get_local_rank()

    @property
    def ranks(self) -> int:
        """The number of shards of a parameter."""
        return self.mesh.size()


@dataclass(frozen=True)
class SpreadExperts:
    """The ranks over which the experts of each layer are spread (expert parallelism); each trains on other data.

    `group`: these ranks. `along`: the ranks along a dimension (`ep`, `etp`), by its position in the mesh of an expert; without
    dimensions of one rank. `replicas`: the ranks with the same experts and other data (None: none). `sharding`: the ranks among
    which these experts are sharded (None: experts are whole).
    """

    group: dist.ProcessGroup
    along: Mapping[int, dist.ProcessGroup]
    replicas: dist.ProcessGroup | None
    sharding: Sharding | None


@dataclass(frozen=True)
class RankPlace:
    """This rank's device and process groups.

    `group`: of its pipeline (None: one process). `replicas`: of the ranks with the same stages and other data (None: none).
    `cp_ep_group`: of the replicas with which the model itself may exchange values (None: none). `tp_group`: of the ranks that
    share the layers of its stages (None: none), `pp_tp_group`: of all ranks of their pipelines, which compute the same
    microbatches (None: `group`). `experts`: None if no other rank has other experts. `sharding`: of parameters that are no
    experts (None: not sharded). `same_parameters`: the ranks with the same parameters (None: none). `parts`: the world ranks
    that together have one copy of the model, where parameters are sharded or experts spread (None: `model_parallel`). `mesh`:
    the caller's, or None. `expert_mesh`: the mesh with the dimension `ep`, or None. `tp_adds_to_experts`: whether ranks along
    `tp` add to the gradient of the same expert. `everyone`: all ranks that compile the model together (None: one process).
    `parts` and `everyone` may be all ranks of the job, and have no process group.
    """

    device: torch.device
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None
    cp_ep_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    pp_tp_group: dist.ProcessGroup | None = None
    experts: SpreadExperts | None = None
    sharding: Sharding | None = None
    same_parameters: dist.ProcessGroup | None = None
    parts: Sequence[int] | None = None
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    tp_adds_to_experts: bool = False
    everyone: RankTree | None = None

    def agreement(self, ranks: Ranks) -> Agreement:
        return Agreement(ranks, self.device, self.described)

    def described(self, rank: int) -> str:
        """How an error names a rank of the world: "rank 5", or "rank 5 (pp 1, tp 0)" with its coordinates on the mesh."""
        found = [] if self.mesh is None else (self.mesh.mesh == rank).nonzero().tolist()
        if self.mesh is None or not found:
            return f"rank {rank}"
        pairs = zip(self.mesh.mesh_dim_names or (), found[0], strict=True)
        return f"rank {rank} ({', '.join(f'{name} {at}' for name, at in pairs)})"

    @property
    def model_parallel(self) -> dist.ProcessGroup | None:
        """The ranks that compute the same microbatches, along `pp` and `tp`; None for one process."""
        return self.group if self.pp_tp_group is None else self.pp_tp_group

    @property
    def whole_model(self) -> Sequence[int]:
        """The world ranks that together have one copy of the model, in order; [0] for one process."""
        if self.parts is not None:
            return self.parts
        return [0] if self.model_parallel is None else dist.get_process_group_ranks(self.model_parallel)

    def name_along(self, dimension: str) -> str:
        """The name of a mesh's process group along a dimension, for the model's own collectives."""
        mesh = self.expert_mesh if dimension in ("ep", "etp") else self.mesh
        assert mesh is not None, "only a mesh has dimensions"
        return mesh.get_group(dimension).group_name

    @property
    def folds_experts(self) -> bool:
        """Whether experts are spread over another factorisation of the ranks than all other parameters."""
        return self.expert_mesh is not self.mesh and self.experts is not None

    @property
    def expert_dims(self) -> tuple[str, ...]:
        """The dimensions over which experts are spread, in order: `ep`, or `ep` and `etp`."""
        names = () if self.expert_mesh is None else self.expert_mesh.mesh_dim_names or ()
        return tuple(name for name in names if name in ("ep", "etp")) or ("ep",)

    @property
    def experts_group(self) -> dist.ProcessGroup | None:
        """The ranks over which experts are spread; None without other ranks."""
        return None if self.experts is None else self.experts.group

    @property
    def rank(self) -> int:
        """This process's rank within the pipeline."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def pipeline_mesh(self) -> DeviceMesh:
        """The ranks of the pipeline, which has more than one."""
        assert self.group is not None, "one rank has no mesh"
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("pp",))

    @property
    def shards(self) -> int | None:
        """The number of shards of a parameter; None if parameters are not sharded."""
        return None if self.sharding is None else self.sharding.ranks

    @property
    def writes_files(self) -> bool:
        """Whether this rank writes files for the ranks with the same parameters."""
        return self.same_parameters is None or dist.get_rank(self.same_parameters) == 0

    @property
    def first_of_all(self) -> bool:
        return self.everyone is None or self.everyone.at == 0

    @property
    def first_of_stage(self) -> bool:
        """Whether this rank has the first parts of the parameters of its stages."""
        shards = [None if each is None else each.group for each in (self.sharding, self.experts and self.experts.sharding)]
        several = (self.tp_group, self.experts_group, *shards)
        return all(group is None or dist.get_rank(group) == 0 for group in several)

    @property
    def first_holder(self) -> bool:
        """Whether this rank is the first of its pipeline and has the first parts of parameters."""
        return self.rank == 0 and self.first_of_stage
