"""Models and meshes with `ep` that would train wrong are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.expert_parallel import mixture
from tests.sharding import Mesh
from tests.tensor_parallel import batch, compiled

EXPERTS, PIPE = Mesh((2,), ("ep",)), Mesh((2, 2), ("pp", "ep"))


def refused(rank: int, mesh: Mesh, what: str) -> str:
    torch.set_num_threads(1)
    made, options = mesh.made(), dict[str, Any]()
    model = mixture(made["ep"])
    experts = model.layers[1].experts
    if what in ("plain", "broadcast"):
        experts.up = nn.Parameter(experts.up.to_local().detach())
    if what == "broadcast":
        options = {"parallel": graphpp.Parallel(replica_values="broadcast")}
    if what == "replicated":
        experts.up = nn.Parameter(distribute_tensor(torch.ones(4, 8, 12), made["ep"], [Replicate()]))
    if what == "other experts":
        with torch.no_grad():
            experts.up.to_local().add_(rank == 3)
    tokens, target = batch(rank)
    with pytest.raises(graphpp.GraphPPError) as caught:
        pipe = compiled(made, model, split=["layers.1"], schedule="1F1B", **options)
        pipe.step(tokens, target=target)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "what", "said"),
    [
        (EXPERTS, "plain", "the values of layers.1.experts.up"),
        (EXPERTS, "broadcast", "replica_values"),
        (EXPERTS, "replicated", "all ranks along ep have whole"),
        *further((Mesh((2, 2), ("dp_replicate", "ep")), "other experts", "the values of layers.1.experts.up")),
    ],
)
def test_models_that_would_train_wrong_are_refused(mesh: Mesh, what: str, said: str) -> None:
    assert all(said in found for found in run_ranks(refused, mesh.ranks, mesh, what))


def over_replicas(rank: int) -> str:
    """The message for a model whose experts are spread over a dimension of data ranks."""
    torch.set_num_threads(1)
    made = Mesh((2,), ("dp_replicate",)).made()
    with pytest.raises(graphpp.GraphPPError) as caught:
        compiled(made, mixture(made["dp_replicate"]))
    return str(caught.value)


def test_experts_over_data_ranks_are_refused() -> None:
    assert all("ep" in found and "layers.0.experts.up" in found for found in run_ranks(over_replicas, 2))


class Gathered(nn.Module):
    """All experts on every rank, gathered in the forward."""

    def __init__(self, mesh: DeviceMesh, placements: list[Placement] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))
        self.head, self.placements = nn.Linear(4, 3), placements

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.weight.full_tensor(grad_placements=self.placements).t()))


def gathering(rank: int, placements: list[Placement] | None) -> torch.Tensor:
    made = EXPERTS.made()
    pipe = graphpp.compile(Gathered(made["ep"], placements), nn.functional.mse_loss, mesh=made, microbatches=2)
    generator = torch.Generator().manual_seed(rank)
    pipe.step(torch.randn(4, 8, generator=generator), target=torch.randn(4, 3, generator=generator))
    return next(iter(pipe.parameters())).grad.full_tensor()


def test_gathered_experts_need_the_gradients_of_all_ranks() -> None:
    with pytest.raises(graphpp.CaptureError, match=r"gathers the experts weight over ep .*grad_placements"):
        run_ranks(gathering, 2, None)
    expected = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    torch.manual_seed(0)
    with torch.no_grad():
        expected[0].weight.copy_(torch.randn(4, 8))
    expected[2] = nn.Linear(4, 3)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)
        (nn.functional.mse_loss(expected(x), y) / 2).backward()
    for found in run_ranks(gathering, 2, [Partial()]):
        torch.testing.assert_close(found, expected[0].weight.grad)
