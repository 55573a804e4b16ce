"""The gradient of a tied parameter becomes one partial sum per stage; all other gradients stay whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.joint.gradient_sums import split_tied_gradients
from graphpp.passes.lower import lower
from graphpp.runtime import program as p
from tests.passes.graphs import Hand, assigned, captured, starts

D = 4


class Tied(nn.Module):
    """Linears that share one weight, called one after the other."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(uses))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def parts(joint: JointGraph, fqn: str) -> list[fx.Node]:
    return [node for role, node in joint.outputs() if role == p.Gradient(fqn)]


def tied(uses: int, cuts: Sequence[str]) -> JointGraph:
    joint = captured(Tied(uses), torch.randn(2, D))
    return split_tied_gradients(assigned(joint, *starts(joint, *cuts)))


@pytest.mark.parametrize(
    ("uses", "cuts", "expected"),
    [
        (3, [], [0]),
        (3, ["layers.1"], [0, 1]),
        (3, ["layers.1", "layers.2"], [0, 1, 2]),
        (5, ["layers.2", "layers.4"], [0, 1, 2]),
    ],
)
def test_one_part_per_stage(uses: int, cuts: list[str], expected: list[int]) -> None:
    joint = tied(uses, cuts)
    verify_joint_graph(joint)
    assert [part.meta["stage"] for part in parts(joint, "layers.0.weight")] == expected
    assert [len(parts(joint, f"layers.{index}.bias")) for index in range(uses)] == [1] * uses


def test_no_part_crosses_a_boundary() -> None:
    joint = captured(Tied(3), torch.randn(2, D))
    compiled = lower(joint, (0, *starts(joint, "layers.1", "layers.2")))
    crossing = [meta for boundary in compiled.boundaries for meta in (*boundary.forward, *boundary.backward)]
    assert [meta.shape for meta in crossing] == [(2, D)] * 4
    assert [stage.gradients.count("layers.0.weight") for stage in compiled.stages] == [1, 1, 1]


def sums(node: fx.Node) -> str:
    """A tree of additions as text."""
    if node.target is not torch.ops.aten.add.Tensor:
        return node.name
    return f"({' + '.join(map(sums, node.all_input_nodes))})"


def added(hand: Hand, left: fx.Node, right: fx.Node, stage: int) -> fx.Node:
    total = hand.graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    total.meta = {**right.meta, "stage": stage}
    return total


def test_a_sum_that_somebody_else_reads_is_not_taken_apart() -> None:
    hand = Hand("w", "v")
    hand.input(p.Parameter("w"))
    a, b, c = (hand.node(name, slot) for name, slot in (("a", "B1"), ("b", "B0"), ("c", "B1")))
    inner = added(hand, a, b, 0)
    hand.result(p.Gradient("w"), added(hand, inner, c, 0))
    hand.result(p.Gradient("v"), inner)
    joint = split_tied_gradients(hand.joint())
    assert [sums(part) for part in parts(joint, "w")] == ["(a + b)", "c"]
    assert [sums(part) for part in parts(joint, "v")] == ["(a + b)"]
