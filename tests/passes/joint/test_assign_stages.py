"""Every node gets its stage: by its position, by its forward twin, or none if every stage can compute it cheaply."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.joint.assign_stages import from_parameter, stage_inputs
from graphpp.passes.lower import lower
from graphpp.runtime import program
from graphpp.runtime.program import Phase, PipelineProgram
from tests.passes.graphs import assigned, captured, copied, forward, starts

D = 4
Function = Callable[[Tensor], Tensor]


class Blocks(nn.Module):
    """Three linears `a`, `b`, `c`; the function `between` combines them."""

    def __init__(self, between: Callable[[Blocks, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))
        self.shared = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.register_buffer("mean", torch.zeros(D))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


def chain(m: Blocks, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x).tanh()).relu())


def skip(m: Blocks, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(h)) + h


def masked(m: Blocks, x: Tensor) -> Tensor:
    mask = torch.ones(D, D).tril() > 0
    h = m.a(x).masked_fill(mask, 0.0)
    return m.c(m.b(h).masked_fill(mask, 0.0)).masked_fill(mask, 0.0)


def heavy(m: Blocks, x: Tensor) -> Tensor:
    table = torch.ones(D, 64) @ torch.ones(64, D)
    return m.c(m.b(m.a(x) * table) * table) * table


def cheap(m: Blocks, x: Tensor) -> Tensor:
    angle = torch.arange(D)[:, None] * torch.arange(1, D + 1)
    return m.c(m.b(m.a(x) * angle.cos()) * angle.cos())


def noisy(m: Blocks, x: Tensor) -> Tensor:
    noise = F.dropout(torch.ones_like(x), 0.5)
    return m.c(m.b(m.a(x) * noise) * noise)


def repeated(m: Blocks, x: Tensor) -> Tensor:
    return m.shared(m.shared(m.shared(m.a(x))))


def from_buffer(m: Blocks, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x) - m.mean.cos()) - m.mean.cos())


def gates(m: Blocks, x: Tensor) -> Tensor:
    one, two = m.b.weight.split(2)
    first, second = m.c.weight.unbind()[:2]
    return (m.a(x) @ one.t()) @ (two @ first.outer(second).reshape(D, D)[:, :2])[:, :1]


def joint_of(between: Callable[[Blocks, Tensor], Tensor]) -> JointGraph:
    return captured(Blocks(between), torch.randn(D, D))


def cut_at(between: Callable[[Blocks, Tensor], Tensor], *calls: str) -> PipelineProgram:
    joint = joint_of(between)
    return lower(joint, (0, *starts(joint, *calls)))


def stages_of_call(joint: JointGraph, call: str) -> set[int | None]:
    return {node.meta["stage"] for node in forward(joint) if call in node.meta["calls"]} - {None}


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("between", [chain, skip, masked, heavy, cheap, noisy, repeated, from_buffer, gates])
def test_stages_never_fall_forward_nor_rise_backward(between: Callable[[Blocks, Tensor], Tensor]) -> None:
    uncut = joint_of(between)
    length = 1 + max(node.meta["position"] for node in uncut.computed())
    for first, second in combinations(range(1, length, max(1, length // 8)), 2):
        joint = assigned(copied(uncut), first, second)
        for node in joint.computed():
            for source in stage_inputs(node) if node.meta["stage"] is not None else ():
                if not node.meta["backward"]:
                    assert not source.meta["backward"]
                    assert source.meta["stage"] <= node.meta["stage"]
                elif source.meta["backward"]:
                    assert source.meta["stage"] >= node.meta["stage"]


def test_a_cut_falls_between_two_module_calls() -> None:
    joint = joint_of(chain)
    assigned(joint, *starts(joint, "b", "c"))
    assert [stages_of_call(joint, name) for name in "abc"] == [{0}, {1}, {2}]
    assert {str(node.target): node.meta["stage"] for node in forward(joint) if not node.meta["calls"]} == {
        "aten.tanh.default": 0, "aten.relu.default": 1, "aten.pow.Tensor_Scalar": 2, "aten.mean.default": 2,
    }  # fmt: skip


def test_an_accumulation_stands_in_the_lowest_stage_of_what_it_adds() -> None:
    joint = joint_of(skip)
    assigned(joint, *starts(joint, "b", "c"))
    (add,) = (n for n in joint.computed() if n.meta["backward"] and n.target is torch.ops.aten.add.Tensor)
    sources = [source.meta["stage"] for source in add.all_input_nodes]
    assert sorted(sources) == [1, 2]
    assert add.meta["stage"] == 1


def sent(compiled: PipelineProgram) -> list[str]:
    """The names of all values that cross a boundary in the forward direction."""
    return [meta.name for boundary in compiled.boundaries for meta in boundary.forward]


@pytest.mark.parametrize("between", [masked, cheap, from_buffer])
def test_what_is_cheap_is_computed_in_every_stage_that_reads_it(between: Callable[[Blocks, Tensor], Tensor]) -> None:
    compiled = cut_at(between, "b", "c")
    assert [len(boundary.forward) for boundary in compiled.boundaries] == [1, 1]
    computes = {masked: "tril", cheap: "cos", from_buffer: "cos"}[between]
    for stage in compiled.stages[:2]:
        assert f"_aten_{computes}" in stage.programs[Phase.FORWARD].source


def test_random_numbers_are_drawn_once() -> None:
    compiled = cut_at(noisy, "b", "c")
    drawn = ["seeded" in stage.programs[Phase.FORWARD].source for stage in compiled.stages]
    assert drawn == [True, False, False]
    assert [len(boundary.forward) for boundary in compiled.boundaries] == [2, 1]


@pytest.mark.parametrize("between", [chain, gates])
def test_views_of_parameters_are_neither_sent_nor_saved(between: Callable[[Blocks, Tensor], Tensor]) -> None:
    uncut = joint_of(between)
    for start in range(1 + max(node.meta["position"] for node in uncut.computed())):
        joint = copied(uncut)
        compiled = lower(joint, (0, start))
        views = {node.name for node in joint.computed() if from_parameter(node)}
        assert views
        assert not views & {*sent(compiled), *(meta.name for stage in compiled.stages for meta in stage.saved)}


def read_later(m: Blocks, x: Tensor) -> Tensor:
    h = m.b(m.a(x) - m.mean)
    with torch.no_grad():
        m.mean.mul_(0.5)
    return m.c(h)


def test_a_buffer_read_before_the_cut_and_written_after_it_is_refused() -> None:
    joint = joint_of(read_later)
    with pytest.raises(CaptureError, match=r"parameter mean is written in stage 1 .* read in\s+stage 0 .* move the cut"):
        assigned(joint, *starts(joint, "b"))
    joint = joint_of(read_later)
    assert isinstance(assigned(joint, *starts(joint, "c")), JointGraph)


def overwritten(m: Blocks, x: Tensor) -> Tensor:
    h = m.c(m.b(m.a(x)) - m.mean)
    m.mean = x.mean(0)
    return h


def test_a_buffer_overwritten_with_a_value_of_the_inputs_is_written_where_it_is_read() -> None:
    joint = joint_of(overwritten)
    compiled = lower(joint, (0, *starts(joint, "b", "c")))
    writers = [
        stage.index
        for stage in compiled.stages
        if program.BufferUpdate("mean") in stage.programs[Phase.FORWARD].outputs
    ]
    assert writers == [1]
    assert [stage.buffers for stage in compiled.stages] == [(), ("mean",), ()]
