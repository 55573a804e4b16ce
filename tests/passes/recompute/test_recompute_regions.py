"""The activations of a region are recomputed right before its backward: once, and only if the numbers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor, fx, nn

from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.recompute.recompute_regions import recompute_regions
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.split_weight_grad import split_weight_grad
from graphpp.runtime.program import Phase, total_bytes
from tests.passes.graphs import assigned, captured, starts

D = 8


class Layer(nn.Module):
    """An MLP with dropout and, optionally, a batch norm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(D, 3 * D), nn.Linear(3 * D, D), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(D) if norm else nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.silu(self.up(self.norm(x)))))


class Layers(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_layer(node: fx.Node) -> Hashable | None:
    return next((call for call in node.meta["calls"] if call.startswith("layers.")), None)


def graph(norm: bool = False) -> JointGraph:
    joint = captured(Layers(norm), torch.randn(4, D))
    return assigned(joint, *starts(joint, "layers.1"))


def counted(joint: JointGraph, backward: bool) -> Counter[str]:
    return Counter(str(node.target) for node in joint.computed() if node.meta["backward"] is backward)


def test_each_operation_of_a_region_runs_again_once_right_before_its_backward() -> None:
    before = graph()
    after = recompute_regions(before.copy(), by_layer)
    verify_joint_graph(after)
    more = counted(after, True) - counted(before, True)
    assert more["aten.silu.default"] == 2 and more["aten.addmm.default"] <= 4
    assert set(counted(before, False) - counted(after, False)) <= {"<built-in function getitem>"}  # of the backward alone
    order = list(after.graph.nodes)
    again = [node for node in after.computed() if node.meta["backward"] and "silu.default" in str(node.target)]
    ends = [max(order.index(user) for user in node.users) for node in again]
    assert order.index(again[0]) < ends[0] < order.index(again[1])  # the last layer's copies are dead by then


def test_both_halves_of_the_backward_share_what_is_computed_again() -> None:
    joint = recompute_regions(graph(), by_layer)
    staged = split_weight_grad(joint, cut_stages(joint, 2))
    for stage in (0, 1):
        run = [
            str(node.target)
            for phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
            for node in staged.graphs[phase, stage].graph.nodes
        ]
        assert run.count("aten.silu.default") == 1  # the other one runs in the forward


def test_a_random_operator_repeats_its_numbers() -> None:
    joint = recompute_regions(graph(), by_layer)
    drawn = Counter(node.args[1] for node in joint.computed() if "seeded" in str(node.target))
    assert drawn and all(times <= 2 for times in drawn.values())


def test_what_writes_a_buffer_runs_once() -> None:
    joint = graph(norm=True)
    normed = [node.target for node in joint.computed() if "batch_norm" in str(node.target) and not node.meta["backward"]]
    after = recompute_regions(joint, by_layer)
    assert len(normed) == 2
    for target in set(normed):
        assert len([node for node in after.computed() if node.target is target]) == normed.count(target)


class Ends(nn.Module):
    """A branch whose last operation's backward reads its result; `reads`: the backward outside of the branch reads it, too."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]), reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        y = self.layers[1](x).tanh()
        return x * y if self.reads else x + y


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_region_hands_out_is_made_again_unless_it_is_saved_anyway(reads: bool) -> None:
    joint = captured(Ends(reads), torch.randn(4, D))
    tanh = next(node for node in joint.computed() if node.target is torch.ops.aten.tanh.default)
    last = tanh.meta["position"]
    joint = assigned(joint)
    before = total_bytes(cut_stages(joint, 1).saved_memory[0])
    first = next(node.meta["position"] for node in joint.computed() if "layers.1" in node.meta["calls"])
    after = recompute_regions(joint.copy(), lambda node: "branch" if first <= node.meta["position"] <= last else None)
    verify_joint_graph(after)
    more = counted(after, True) - counted(joint, True)
    assert more["aten.tanh.default"] == (0 if reads else 1)
    assert total_bytes(cut_stages(after, 1).saved_memory[0]) == before - (0 if reads else 4 * D * 4)
