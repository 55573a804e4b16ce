"""Values that are not saved are recomputed where the backward first reads them: once, and only if the numbers stay the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.graph.op_costs import OpCosts, is_cheap
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.recompute.rematerialize import RecomputeBudget, choose_recomputed, rematerialize
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.split_weight_grad import split_weight_grad
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase
from tests.passes.graphs import assigned, captured, starts

D = 8
COSTS = OpCosts.of("cpu")
ANYTHING = 1.0  # seconds per byte: every cheap operation runs again, however small its value


class Layer(nn.Module):
    """A norm, a gated MLP, dropout, a residual."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(D)
        self.up, self.gate, self.down = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.drop(self.down(nn.functional.silu(self.up(normed)) * self.gate(normed)))


class Layers(nn.Module):
    def __init__(self, count: int = 2, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_layer(node: fx.Node) -> str | None:
    return next((call for call in node.meta["calls"] if call.startswith("layers.")), None)


def graph(model: nn.Module | None = None, *calls: str) -> JointGraph:
    model = model or Layers()
    joint = captured(model, torch.randn(4, D))
    return assigned(joint, *starts(joint, *calls))


def lean(joint: JointGraph, stages: int = 2, **terms: Any) -> JointGraph:
    joint = joint.copy()
    budget = RecomputeBudget(**{"seconds_per_byte": ANYTHING, "cost": COSTS} | terms)
    return rematerialize(joint, choose_recomputed(joint, stages, budget))


def saved(joint: JointGraph, staged: StagedGraphs, stage: int) -> list[fx.Node]:
    named = {node.name: node for node in joint.graph.nodes}
    return [named[meta.name] for meta in staged.saved[stage]]


def again(joint: JointGraph) -> list[fx.Node]:
    return [node for node in joint.computed() if node.meta.get("recomputed")]


def test_nothing_cheap_is_saved_beside_what_it_is_computed_from() -> None:
    joint = lean(graph(None, "layers.1"))
    verify_joint_graph(joint)
    staged = cut_stages(joint, 2)
    for stage in (0, 1):
        kept = saved(joint, staged, stage)
        for node in kept:
            there = all(source in kept or source.op == "placeholder" for source in node.all_input_nodes)
            assert not (is_cheap(node) and there), f"{node} is saved"


def test_each_value_is_made_once_right_before_its_first_reader() -> None:
    joint = lean(graph(None, "layers.1"))
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    copies = again(joint)
    assert len({(node.meta["stage"], node.meta["position"], node.name) for node in copies}) == len(copies)
    for node in copies:
        first = min(order[user] for user in node.users)
        between = [other for other in joint.graph.nodes if order[node] < order[other] < first]
        assert all(other.meta.get("recomputed") for other in between), f"{node} waits for its reader"
    assert Counter(str(node.target) for node in copies)["aten.silu.default"] == 2


@pytest.mark.parametrize("fraction", [None, 1.0, 0.7, 0.5, 0.3, 0.01])
def test_the_same_crosses_and_no_more_is_saved(fraction: float | None) -> None:
    before = graph(None, "layers.1")
    text = str(before.graph)
    plain, staged = cut_stages(before, 2), cut_stages(lean(before, fraction=fraction, region_of=by_layer), 2)
    lean_most, lean_least = cut_stages(lean(before), 2), cut_stages(lean(before, fraction=1e-9, region_of=by_layer), 2)
    assert staged.boundaries == plain.boundaries
    for saved, *others in zip(*(each.saved_memory for each in (staged, plain, lean_most, lean_least)), strict=True):
        nbytes, (all_of_it, free, least) = p.total_bytes(saved), map(p.total_bytes, others)
        assert nbytes <= all_of_it
        assert fraction is None or nbytes <= max(fraction * free, least)
    assert str(before.graph) == text


@pytest.mark.parametrize("fraction", [None, 0.3])
def test_i_and_w_compute_a_value_once_and_keep_no_more_between_them(fraction: float | None) -> None:
    before = graph(Layers(3), "layers.1", "layers.2")
    joint = lean(before, 3, fraction=fraction, region_of=by_layer)
    staged = split_weight_grad(joint, cut_stages(joint, 3))
    plain = split_weight_grad(before, cut_stages(before, 3))
    for stage in (1, 2):
        halves = [staged.graphs[phase, stage].graph for phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)]
        names = [node.name for half in halves for node in half.nodes if node.op == "call_function"]
        assert len(names) == len(set(names))
        assert p.total_bytes(staged.kept_memory[stage]) <= p.total_bytes(plain.kept_memory[stage])


def test_a_gradient_that_is_a_value_of_the_forward_is_made_again() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, D))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x.exp().sin()

    joint = captured(Scale(), torch.randn(4, D), loss=lambda output, target: output.sum())
    joint = lean(assigned(joint), 1)
    verify_joint_graph(joint)
    assert any(isinstance(role, p.Gradient) for role, _ in joint.outputs())
    assert p.total_bytes(cut_stages(joint, 1).saved_memory[0]) == 0
