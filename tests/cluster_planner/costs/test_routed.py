"""Experts with slots: the graph has their number as a plain number, which depends on the rows or does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp.cluster_planner.costs import Deployment, ModelCosts, capture_costs, priced
from graphpp.devices import Machines
from graphpp.schedules.table.actions import Kind
from tests import tensor_parallel
from tests.exhaustive import further

H100 = Machines.read("8xH100")
PLAN = {"layers.*.up": "expert", "layers.*.down": "expert"}


class Layer(nn.Module):
    """Four experts, of which each token takes two."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(16, 4), capacity
        self.up, self.down = nn.Parameter(torch.zeros(4, 16, 32)), nn.Parameter(torch.zeros(4, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = torch.softmax(self.gate(tokens), -1).topk(2)
        found = graphpp.experts.routed(tokens, chosen, weights, self.compute, 4, capacity=self.capacity)
        return x + found.view_as(x)

    def compute(self, rows: Tensor) -> Tensor:
        return F.gelu(rows @ self.up) @ self.down


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.layers = nn.ModuleList(Layer(capacity) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _example(rows: int) -> graphpp.Microbatch:
    tokens = torch.zeros(rows, 16, dtype=torch.int64)
    return graphpp.Microbatch((tokens,), {}, tokens)


def _costs(capacity: int | None, rows: int) -> ModelCosts:
    return capture_costs(Model(capacity), tensor_parallel.loss, _example(rows), param_dtype=None, expert_plan=PLAN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [20, *further(None)])
def test_work_of_slots_is_that_of_a_second_capture(capacity: int | None) -> None:
    few, more = (priced(_costs(capacity, rows), H100, Deployment(rows=4)) for rows in (2, 4))
    assert few.flops == more.flops
    for one, other in zip(few.segments.costs.stages, more.segments.costs.stages, strict=True):
        assert one.saved_bytes == pytest.approx(other.saved_bytes, abs=64)  # one slot takes the tokens that have none
        assert one.forward == pytest.approx(other.forward, rel=1e-3)


def test_slots_are_exchanged_by_the_ranks_of_experts() -> None:
    costs = _costs(20, 2)
    stages = priced(costs, H100, Deployment(rows=2, ep=4)).segments.costs.stages
    exchanged = [stage.exchanged[Kind.F] for stage in stages]
    assert [costs.names[segment] for segment, seconds in enumerate(exchanged) if seconds] == ["layers.0", "layers.1"]
    assert exchanged[costs.layers[0]] == pytest.approx(2 * H100.all_to_all(4 * 20 * 16 * 4, 4))
