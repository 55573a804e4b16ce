"""A model whose experts are spread over ranks, and trainings of it on meshes with `ep`.

Contract: `mixture(mesh)` has `DTensor` experts over the ranks of `mesh`, each of which has some; `mixture(None)` has all of
them in one process. Each expert takes an equal number of the tokens of each rank, those that want it most, so both compute the
same function of the ranks' batches. `train_on_mesh` runs on one rank and gathers whole gradients and parameters there.
`train_alone` is a plain loop in one process over all ranks' batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from tests.sharding import Mesh
from tests.tensor_parallel import VOCAB, WIDTH, Trained, compiled, train

HIDDEN, EXPERTS = 12, 4
CUTS = {1: None, 2: ["layers.1"], 4: ["layers.0.experts", "layers.1", "layers.1.experts"]}  # by number of stages


class Experts(nn.Module):
    """Feed-forward networks, one for each expert; tokens come as [experts, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, local(self.up))), local(self.down))


def local(weight: Tensor) -> Tensor:
    """This rank's experts."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


class Layer(nn.Module):
    """Route tokens to experts, on this rank and on others, and add their answers."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group, self.ranks = group, 1 if group is None else dist.get_world_size(group)
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        h = self.norm(tokens)
        weight, chosen = torch.softmax(self.router(h), -1).topk(len(h) // EXPERTS, dim=0)  # [tokens of an expert, experts]
        rows, weight = chosen.t().reshape(-1), weight.t().reshape(-1, 1)
        each = (self.ranks, EXPERTS // self.ranks, -1, WIDTH)
        sent = self.exchange(h[rows]).view(each).transpose(0, 1).flatten(1, 2)  # [own experts, tokens of all ranks, width]
        answers = self.experts(sent).view(each[1], each[0], -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        return tokens.index_add(0, rows, self.exchange(answers) * weight).view_as(x)

    def exchange(self, x: Tensor) -> Tensor:
        return x if self.group is None else collectives.all_to_all_single_autograd(x, None, None, self.group)


class Mixture(nn.Module):
    """Tokens to logits."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(group) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixture(mesh: DeviceMesh | None, *, seed: int = 3) -> Mixture:
    """The model with its experts over the ranks of `mesh` (None: all of them here)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(seed)
    model = Mixture(None if mesh is None else mesh.get_group())
    for layer in model.layers if mesh is not None else ():
        for name, weight in list(layer.experts.named_parameters()):
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    return model


def train_on_mesh(rank: int, mesh: Mesh, options: Mapping[str, Any], flat: bool = False) -> Trained:
    """Train with batches of each rank's own. `flat`: with an optimizer of flat parameters."""
    torch.set_num_threads(1)
    made = mesh.made()
    return train(compiled(made, mixture(made["ep"]), **options), [mesh.replica(rank)], flat=flat)


@cache
def train_alone(replicas: int) -> Trained:
    """The same training in one process; the losses are those of the first rank."""
    return train(compiled(None, mixture(None)), range(replicas))
