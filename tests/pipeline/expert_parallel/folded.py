"""A decoder whose layers `tp` spreads, and whose experts are spread over another factorisation of the same ranks.

Contract: `folded(mesh, experts)` shards attention and norms over `mesh["tp"]` with sequence parallelism, so that each rank of
`tp` sends its own tokens to experts over `experts["ep"]`, and shares each expert over `experts["etp"]`. `folded(None, None)` is
the same function in one process. `train_folded` runs on one rank and gathers whole gradients and parameters there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphpp
from graphpp.experts import routed
from tests.sharding import Mesh
from tests.tensor_parallel import VOCAB, WIDTH, Trained, compiled, train

EXPERTS, HIDDEN, CHOICES, HEADS = 4, 12, 2, 4
CUTS = {2: ["layers.1"], 4: ["layers.0.norm2", "layers.1", "layers.1.norm2"]}  # by number of stages


class Mixture(nn.Module):
    """A feed-forward network for each token, of the experts that the token chooses; [rows, tokens, width] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.groups: dict[str, Any] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.router(x), -1).flatten(0, 1).topk(CHOICES)
        return routed(x.flatten(0, 1), chosen, weights, self.compute, EXPERTS, **self.groups).view_as(x)

    def compute(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, _local(self.up))), _local(self.down))


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Layer(nn.Module):
    """Causal attention over the heads of this rank, and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2, self.mixture = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mixture()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [
            each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def folded(mesh: DeviceMesh | None, experts: DeviceMesh | None, *, shards_tokens: bool = True) -> Decoder:
    """`shards_tokens`: whether ranks along `tp` have other tokens where they meet the experts."""
    made = Decoder()
    for layer in made.layers if experts is not None else ():
        place_experts(layer.mixture, experts)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        between = Shard(1) if shards_tokens else Replicate()
        for layer in made.layers:
            _spread_layer(layer, mesh["tp"], between)
        given = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(between,), use_local_output=True
        )
        head = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        ends: dict[str, Any] = {
            "layers.0": given,
            "head": head,
            **({"norm": SequenceParallel()} if shards_tokens else {}),
        }
        parallelize_module(made, mesh["tp"], ends)
    return made


def place_experts(mixture: Mixture, experts: DeviceMesh) -> None:
    names = tuple(name for name in experts.mesh_dim_names or () if name in ("ep", "etp"))
    for name, placements in (("up", (Shard(0), Shard(2))), ("down", (Shard(0), Shard(1)))):
        weight = distribute_tensor(getattr(mixture, name).detach(), experts[names], placements[: len(names)])
        setattr(mixture, name, nn.Parameter(weight))
    mixture.groups = {"group": experts.get_group("ep")}
    if "etp" in names and experts["etp"].size() > 1:
        mixture.groups["tensor_group"] = experts.get_group("etp")


def _spread_layer(layer: Layer, mesh: DeviceMesh, between: Any) -> None:
    plan: dict[str, Any] = {name: ColwiseParallel(input_layouts=between) for name in ("query", "key", "value")}
    plan["out"] = RowwiseParallel(output_layouts=between)
    if between.is_shard():
        plan |= {"norm": SequenceParallel(), "norm2": SequenceParallel()}
        plan["mixture"] = PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(between,), use_local_output=True
        )
        plan["mixture.router"] = SequenceParallel(use_local_output=True)
    parallelize_module(layer, mesh, plan)


def train_folded(rank: int, mesh: Mesh, experts: Mesh, options: Mapping[str, Any]) -> Trained:
    """Train with batches of each replica's own, which ranks along `tp` share."""
    torch.set_num_threads(1)
    made, places = mesh.made(), experts.made()
    given = {**options, "parallel": graphpp.Parallel(expert_mesh=places, **options.get("parallel", {}))}
    return train(compiled(made, folded(made, places), **given), [mesh.replica(rank)])


@cache
def train_alone(replicas: int) -> Trained:
    return train(compiled(None, folded(None, None)), range(replicas))
