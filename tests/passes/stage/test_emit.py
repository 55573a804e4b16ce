"""A stage owns the parameters and buffers that its programs use; unused ones have one owner; the hook sees every pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.joint.key_dropout_and_random_ops import key_random_ops
from graphpp.passes.joint.views import relax_views
from graphpp.passes.lower import PassResult, lower
from graphpp.planner.plan import outermost
from graphpp.runtime.program import PipelineProgram
from graphpp.runtime.random_keys import seeded
from tests.passes.graphs import captured, run, starts, targets, traced

D = 4


class Layer(nn.Module):
    """Two linears, of which one is never called, and an unused buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(D))
        self.register_buffer("spare", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.scale


class Model(nn.Module):
    """Three layers, a shared table, and modules that the forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.table = nn.Parameter(torch.ones(D))
        self.spare = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.table
        return x


def compiled(*calls: str) -> PipelineProgram:
    joint = captured(Model(), torch.randn(2, D))
    return lower(joint, (0, *starts(joint, *calls)))


def owners(name: str, program: PipelineProgram) -> list[int]:
    return [stage.index for stage in program.stages if name in (*stage.parameters, *stage.buffers)]


class Inner(nn.Module):
    """A model inside a module that calls it, and that has operations of its own before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2.0).tanh()


def test_stages_are_named_by_the_modules_that_lie_within_them() -> None:
    joint = captured(Inner(), torch.randn(2, D))
    program = lower(joint, (0, *starts(joint, "inner.layers.1", "inner.layers.2.used")))
    assert [outermost(stage.modules) for stage in program.stages] == [
        ("inner.layers.0",), ("inner.layers.1",), ("inner.layers.2",),
    ]  # fmt: skip
    halves = lower(joint, (0, starts(joint, "inner.layers.0")[0], starts(joint, "inner.layers.2")[0] + 2))
    assert [outermost(stage.modules) for stage in halves.stages] == [
        (), ("inner.layers.0 .. inner.layers.1", "inner.layers.2.used"), ("inner.layers.2",),
    ]  # fmt: skip


def test_what_is_used_belongs_to_every_stage_that_uses_it() -> None:
    program = compiled("layers.1", "layers.2")
    assert owners("table", program) == [0, 1, 2]
    for stage in range(3):
        assert owners(f"layers.{stage}.used.weight", program) == [stage]
        assert owners(f"layers.{stage}.scale", program) == [stage]


def test_what_is_unused_belongs_to_the_stage_of_its_relatives() -> None:
    program = compiled("layers.1", "layers.2")
    for stage in range(3):
        assert owners(f"layers.{stage}.unused.weight", program) == [stage]
        assert owners(f"layers.{stage}.spare", program) == [stage]
    assert owners("never.weight", program) == [0]
    assert owners("spare", program) == [0]


def test_every_parameter_and_buffer_has_an_owner_in_the_models_order() -> None:
    model, program = Model(), compiled("layers.1")
    order = [name for name, _ in model.named_parameters()]
    for stage in program.stages:
        assert list(stage.parameters) == sorted(stage.parameters, key=order.index)
    named = (*model.named_parameters(), *model.named_buffers())
    assert all(owners(name, program) for name, _ in named)


def test_the_hook_sees_every_pass_in_order_with_its_result() -> None:
    seen: list[PassResult] = []
    program = lower(captured(Model(), torch.randn(2, D)), (0, 3), seen.append)
    names = [passed.name for passed in seen]
    assert names[0] == "clean_up"
    assert names[-2:] == ["cut_stages", "emit"]
    marking = ["snapshot_buffers", "key_random_ops", "assign_stages", "split_tied_gradients"]
    assert [name for name in names if name in marking] == marking
    kinds = [type(passed.result) for passed in seen]
    assert kinds == [JointGraph] * (len(seen) - 2) + [StagedGraphs, PipelineProgram]
    assert seen[-1].result is program
    assert all(passed.seconds >= 0 for passed in seen)


def test_a_view_takes_values_of_other_strides_than_were_captured() -> None:
    joint = traced(lambda x: x.view(6, 4), torch.zeros(2, 3, 4))
    other = torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)
    assert targets(relax_views(joint)) == ["aten.reshape.default"]
    assert torch.equal(run(joint, other)[0], other.reshape(6, 4))
    dense = torch.arange(24.0).view(2, 3, 4)
    assert run(joint, dense)[0].data_ptr() == dense.data_ptr()


def test_what_reads_memory_by_layout_reads_what_was_captured() -> None:
    joint = traced(lambda x: (x + 0).as_strided((2, 2), (2, 1), 1), torch.zeros(2, 3))
    other = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(run(relax_views(joint), other)[0], other.contiguous().as_strided((2, 2), (2, 1), 1))


@pytest.mark.parametrize("example", [torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(2, 4, 6).permute(1, 2, 0)])
def test_dropout_drops_the_elements_of_the_captured_layout_for_inputs_of_any_strides(example: Tensor) -> None:
    dropout = torch.ops.aten.native_dropout.default
    joint = relax_views(key_random_ops(traced(lambda x: list(dropout(x + 0, 0.5, True)), example)))
    value = torch.rand(example.shape) + 1
    expected = seeded(7, 0, dropout, torch.empty_like(example).copy_(value), 0.5, True)
    for layout in (value, value.mT.contiguous().mT, value.transpose(0, -1).contiguous().transpose(0, -1)):
        for found, other in zip(run(joint, 7, layout), expected, strict=True):
            assert torch.equal(found, other) and found.stride() == other.stride()
