"""A gradient that is a matrix product is handed out as its factors, with the product's place in the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import PhaseGraph, StagedGraphs
from graphpp.passes.joint.views import relax_views
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.fuse_grad_accumulation import fuse_grad_accumulation
from graphpp.passes.text.render import render
from graphpp.runtime import program as p
from graphpp.runtime.gradients.accumulate import FusedAccumulator, MicrobatchSink
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul
from tests.passes.graphs import Hand, assigned, captured

Function = Callable[[Tensor, Tensor], Tensor]
B = p.Phase.BACKWARD


class Of(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.w = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def staged_of(function: Function, shape: tuple[int, ...], *x: int) -> tuple[JointGraph, StagedGraphs]:
    joint = relax_views(assigned(captured(Of(function, *shape), torch.randn(x or (6, 3)))))
    return joint, cut_stages(joint, 1)


def backward(staged: StagedGraphs) -> PhaseGraph:
    return staged.graphs[B, 0]


def products(slot: PhaseGraph) -> list[tuple[Any, ...]]:
    return [node.args for node in slot.graph.nodes if node.target is deferred_matmul]


def arguments(slot: PhaseGraph) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(node.meta["val"].shape) for node in slot.graph.find_nodes(op="placeholder")]


def assert_same_gradient(before: PhaseGraph, after: PhaseGraph) -> None:
    """Run the gradient alone, and twice into one sum."""
    (expected,) = render(before.graph).load("before")(arguments(before))
    run = render(after.graph).load("after")
    torch.testing.assert_close(sum(run(arguments(after))), expected)
    sums = FusedAccumulator(["w"])
    sums.start({}, {"w": torch.float32})
    for microbatch in range(2):
        run(arguments(after), MicrobatchSink(sums, microbatch, dict.fromkeys(range(9), "w")))
    torch.testing.assert_close(sums.sums["w"], 2 * expected)
    assert sums.sums["w"].is_contiguous()


PLAIN, INSIDE = None, ((3, 2, 5), (2, 3, 5), (5, 10, 1))
WEIGHTS: dict[str, tuple[Function, tuple[int, ...], Any]] = {  # function, shape of the weight, the place of the product
    "linear": (nn.functional.linear, (5, 3), PLAIN),
    "matrix": (lambda x, w: x @ w, (3, 5), PLAIN),
    "transposed": (lambda x, w: x @ w.t(), (5, 3), PLAIN),
    "transposed from the left": (lambda x, w: w @ x.t(), (5, 3), PLAIN),
    "three axes": (lambda x, w: x @ w.reshape(3, 4), (3, 2, 2), ((3, 2, 2), (3, 4), (4, 1))),
    "three axes, turned": (lambda x, w: x @ w.flatten(1).t(), (4, 1, 3), ((4, 1, 3), (4, 3), (3, 1))),
    "one too many": (lambda x, w: x @ w.squeeze(0), (1, 3, 5), ((1, 3, 5), (3, 5), (5, 1))),
    "batches": (lambda x, w: torch.bmm(x.view(2, 3, 3), w), (2, 3, 5), PLAIN),
    "batches, turned": (lambda x, w: torch.bmm(x.view(2, 3, 3), w.mT), (2, 5, 3), PLAIN),
    "batches inside": (lambda x, w: torch.bmm(x.view(2, 3, 3), w.transpose(0, 1)), (3, 2, 5), INSIDE),
    "columns of a row": (lambda x, w: x @ w, (3, 1), PLAIN),
    "one row": (lambda x, w: x[:, :1] @ w, (1, 4), PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_found_and_placed(name: str) -> None:
    function, shape, place = WEIGHTS[name]
    _, staged = staged_of(function, shape)
    after = backward(fuse_grad_accumulation(staged))
    ((_, _, *within),) = products(after)
    assert (within or [PLAIN]) == [place]
    assert not any(str(node.target) in ("aten.mm.default", "aten.bmm.default") for node in after.graph.nodes)
    assert_same_gradient(backward(staged), after)


OTHERS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "scaled": (lambda x, w: x @ (2 * w), (3, 5)),
    "summed": (lambda x, w: (x + w).square(), (3,)),
    "broadcast": (lambda x, w: torch.bmm(x.view(2, 3, 3), w.expand(2, 3, 3)), (3, 3)),
    "columns that no stride reaches": (lambda x, w: x @ w.transpose(0, 1).reshape(3, 4), (2, 3, 2)),
    "a part": (lambda x, w: x @ w[:, :3].t(), (5, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_as_they_are(name: str) -> None:
    _, staged = staged_of(*OTHERS[name])
    after = backward(fuse_grad_accumulation(staged))
    assert products(after) == []
    assert_same_gradient(backward(staged), after)


def test_a_sum_of_products_is_several_results() -> None:
    _, staged = staged_of(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w) @ w.t() + x * w.sum(), (3, 3))
    after = backward(fuse_grad_accumulation(staged))
    assert after.outputs == (p.Gradient("w"),) * 4
    assert len(products(after)) == 3
    assert not any(str(node.target) == "aten.add.Tensor" and node.users == {} for node in after.graph.nodes)
    assert_same_gradient(backward(staged), after)


def test_a_product_that_somebody_else_reads_is_made() -> None:
    hand = Hand("w", "v")
    square = torch.empty(3, 3, device="meta")
    a, b = (hand.input(p.Parameter(fqn), square) for fqn in "wv")
    forward = hand.node("f", "F0", a, value=square)
    hand.result(p.Loss(), forward)
    shared, own = (hand.node(name, "B0", forward, b, value=square) for name in ("shared", "own"))
    for node in (shared, own):
        node.target = torch.ops.aten.mm.default
    reader = hand.node("reader", "B0", shared, value=square)
    for role, node in ((p.Gradient("w"), shared), (p.Gradient("v"), own), (p.Gradient("u"), reader)):
        hand.result(role, node)
    staged = cut_stages(hand.joint(), 1)
    before = [node.name for node in backward(staged).graph.nodes]
    after = backward(fuse_grad_accumulation(staged))
    results = dict(zip(after.outputs, after.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    assert [results[p.Gradient(fqn)].target is deferred_matmul for fqn in "wvu"] == [False, True, False]
    assert [node.name for node in backward(staged).graph.nodes] == before, "the staged graphs were changed"
