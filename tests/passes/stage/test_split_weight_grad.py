"""I has the nodes that a sent gradient depends on, W all others, each once; the bytes alive between the two are minimal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpp.options.recompute import Recompute
from graphpp.passes.graph.joint_graph import is_tensor
from graphpp.passes.graph.stage_graphs import PhaseGraph, StagedGraphs
from graphpp.passes.lower import LoweringOptions, PassResult, lower
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.split_weight_grad import split_weight_grad
from graphpp.planner.recompute_policy import may_repeat_in_weight_grad
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase
from tests.passes.graphs import assigned, captured, starts

I, W, B = Phase.INPUT_GRAD, Phase.WEIGHT_GRAD, Phase.BACKWARD  # noqa: E741
D = 8


class Layer(nn.Module):
    """A norm, a gated MLP, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Three layers; if `again`, the last one is the second one called a second time."""

    def __init__(self, again: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2 if again else 3)])
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(3):
            x = self.layers[min(index, len(self.layers) - 1)](x)
        return x


def halves(model: nn.Module, *calls: str, rerun: bool = False) -> StagedGraphs:
    """The phase graphs of a model cut before these calls, with I and W."""
    joint = captured(model, torch.randn(4, D))
    joint = assigned(joint, *starts(joint, *calls))
    return split_weight_grad(joint, cut_stages(joint, 1 + len(calls)), may_repeat_in_weight_grad(Recompute(weight_grad=rerun)))


def names(slot: PhaseGraph) -> list[str]:
    return [node.name for node in slot.graph.nodes if node.op == "call_function"]


def roles(items: tuple[Any, ...], kind: type) -> list[str]:
    return [role.name if hasattr(role, "name") else role.fqn for role in items if isinstance(role, kind)]


def ancestors(slot: PhaseGraph, kind: type) -> set[str]:
    """The nodes that the results of a kind depend on."""
    results = zip(slot.outputs, slot.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    pending: list[fx.Node] = [node for role, node in results if isinstance(role, kind)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        found.add(node)
        pending += [source for source in node.all_input_nodes if source not in found]
    return {node.name for node in found if node.op == "call_function"}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_i_has_what_a_sent_gradient_needs_and_w_the_rest(stage: int, again: bool) -> None:
    staged = halves(Layers(again), "layers.1", "layers.1@1" if again else "layers.2")
    first, second, whole = (staged.graphs[phase, stage] for phase in (I, W, B))
    several = {node.name for node in whole.graph.nodes if not is_tensor(node) or "getitem" in node.name}
    assert ancestors(first, p.Sent) <= set(names(first)) <= ancestors(whole, p.Sent) | several
    assert Counter(names(first) + names(second)) == Counter(names(whole))
    assert roles(first.outputs, p.Sent) == roles(whole.outputs, p.Sent) and not roles(second.outputs, p.Sent)
    gradients = [*roles(first.outputs, p.Gradient), *roles(second.outputs, p.Gradient)]
    assert sorted(gradients) == sorted(roles(whole.outputs, p.Gradient))
    handed = set(roles(first.outputs, p.Saved))
    assert set(roles(second.inputs, p.Saved)) == handed | set(roles(second.inputs, p.Saved)) & set(
        roles(whole.inputs, p.Saved)
    )


def test_a_weight_gradient_that_comes_with_an_input_gradient_is_made_by_i() -> None:
    staged = halves(Layers(), "layers.1", "layers.2")
    first = roles(staged.graphs[I, 1].outputs, p.Gradient)
    assert not any("up" in fqn or "down" in fqn for fqn in first)
    assert {fqn.rpartition(".")[0] for fqn in first} <= {"layers.1.norm"}


def test_the_first_stage_has_only_w() -> None:
    staged = halves(Layers(), "layers.1")
    first, second = staged.graphs[I, 0], staged.graphs[W, 0]
    assert names(first) == []
    assert roles(first.outputs, p.Saved) == roles(staged.graphs[B, 0].inputs, p.Received)  # the received values are kept for W
    assert names(second) == names(staged.graphs[B, 0])


def test_behind_a_frozen_stage_everything_is_w_and_a_frozen_stage_has_neither() -> None:
    staged = halves(Layers(frozen=1), "layers.1", "layers.2")
    assert [names(staged.graphs[phase, 0]) for phase in (I, W)] == [[], []]
    assert names(staged.graphs[I, 1]) == []
    assert names(staged.graphs[W, 1]) == names(staged.graphs[B, 1])


def test_the_recipe_splits_only_where_it_is_asked_to() -> None:
    seen: list[str] = []

    def hook(passed: PassResult) -> None:
        seen.append(passed.name)

    joint = captured(Layers(), torch.randn(4, D))
    made = lower(joint, (0, *starts(joint, "layers.1")), hook)
    assert set(made.stages[1].programs) == {Phase.FORWARD, B} and "split_weight_grad" not in seen
    joint = captured(Layers(), torch.randn(4, D))
    made = lower(joint, (0, *starts(joint, "layers.1")), hook, LoweringOptions(split_backward=True))
    assert set(made.stages[1].programs) == {Phase.FORWARD, B, I, W}
    assert seen.index("split_weight_grad") == len(seen) - 2
    assert made.stages[1].kept_bytes > 0
