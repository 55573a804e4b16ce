"""`clean_up` removes identities and dead code, and nothing else. `GOLDEN_UPDATE=1` writes the golden text anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.joint.clean_up import clean_up
from tests.passes.graphs import captured, run, targets, traced

aten = torch.ops.aten
GOLDEN = Path(__file__).parents[2] / "golden" / "passes" / "clean_up.txt"

x = torch.arange(24.0).view(2, 3, 4)
square = torch.arange(9.0).view(3, 3)
thin = torch.arange(4.0).view(1, 4, 1)

NOTHING: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "detach": (lambda x: x.detach(), x),
    "alias": (aten.alias.default, x),
    "view": (lambda x: aten.view.default(x, [2, 3, 4]), x),
    "reshape": (lambda x: aten.view.default(x, [2, -1, 4]), x),
    "expand": (lambda x: aten.expand.default(x, [2, -1, 4]), x),
    "slice": (lambda x: aten.slice.Tensor(x, 1, 0, 99), x),
    "clone": (lambda x: x.clone(), x),
    "clone of a transposed": (aten.clone.default, square.t()),
    "cast": (lambda x: aten._to_copy.default(x, dtype=torch.float32), x),
    "squeeze": (lambda x: aten.squeeze.dims(x, [0, 1]), x),
    "permute": (lambda x: aten.permute.default(x, [0, 1, 2]), x),
    "transpose of a dimension with itself": (lambda x: aten.transpose.int(x, 1, 1), square),
    "t(t(x))": (lambda x: aten.t.default(aten.t.default(x)), square),
    "a chain": (lambda x: aten.view.default(x.detach().clone(), [2, 3, 4]).detach(), x),
    "x ** 1": (lambda x: aten.pow.Tensor_Scalar(x, 1), x),
}

SOMETHING: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "transpose of a square": (lambda x: x.t(), square),
    "transpose of equal sizes": (lambda x: x.transpose(0, 1), square),
    "permute of a cube": (lambda x: x.permute(2, 0, 1), torch.arange(27.0).view(3, 3, 3)),
    "slice with a step": (lambda x: x[:, ::2], x),
    "slice from one": (lambda x: x[1:], x),
    "slice at the end": (lambda x: x[:, :-1], x),
    "view to another shape": (lambda x: x.view(6, 4), x),
    "expand": (lambda x: x.expand(3, 4, 2), thin),
    "clone that closes gaps": (lambda x: x.clone(), x[:, :, ::2]),
    "clone to another order": (lambda x: x.clone(memory_format=torch.contiguous_format), square.t()),
    "clone of an expanded": (lambda x: x.clone(), torch.ones(1).expand(3)),
    "cast to another type": (lambda x: x.to(torch.bfloat16), x),
    "copy of a conjugate": (lambda x: x.conj().resolve_conj(), torch.ones(2, dtype=torch.complex64) * 1j),
    "x ** 2": (lambda x: x**2, x),
    "integer ** 1.0": (lambda x: aten.pow.Tensor_Scalar(x, 1.0), torch.arange(3)),
}


def results(function: Callable[[Tensor], Tensor], value: Tensor) -> tuple[JointGraph, Tensor, Tensor]:
    """The cleaned graph of `function(value) + 1`, and the function's result before and after."""
    joint = traced(lambda x: (function(x), x + 1), value)
    before = run(joint, value)[0]
    clean_up(joint)
    verify_joint_graph(joint)
    return joint, before, run(joint, value)[0]


@pytest.mark.parametrize("name", NOTHING)
def test_what_computes_nothing_goes(name: str) -> None:
    joint, before, after = results(*NOTHING[name])
    assert targets(joint) == ["aten.add.Tensor"]
    assert torch.equal(before, after)
    assert before.stride() == after.stride()


@pytest.mark.parametrize("name", SOMETHING)
def test_what_computes_something_stays(name: str) -> None:
    function, value = SOMETHING[name]
    joint, before, after = results(function, value)
    assert targets(joint) == targets(traced(lambda x: (function(x), x + 1), value))
    assert torch.equal(before.resolve_conj(), after.resolve_conj())
    assert (before.stride(), before.dtype) == (after.stride(), after.dtype)


def test_unused_nodes_go_and_inputs_stay() -> None:
    def function(x: Tensor, unused: Tensor) -> Tensor:
        (x * 3).sin()
        return x + 1

    joint = clean_up(traced(function, x, x))
    assert targets(joint) == ["aten.add.Tensor"]
    assert len(joint.inputs()) == 2


class Layer(nn.Module):
    """A model whose trace has identities and dead code of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.reshape(x.shape)).contiguous().tanh()
        return (y.transpose(0, 1) + y.detach().clone().t()).square()


def listing(joint: JointGraph) -> str:
    """The graph as text, one line per node."""
    lines = [f"{node.name} = {node.target}{_arguments(node.args)}" for node in joint.computed()]
    return "\n".join([*lines, *(f"{role} = {node.name}" for role, node in joint.outputs())])


def _arguments(args: tuple[Any, ...]) -> str:
    return "(" + ", ".join(map(str, args)) + ")"


def test_golden() -> None:
    joint = captured(Layer(), torch.zeros(4, 4))
    before = listing(joint)
    text = f"before\n\n{before}\n\nafter\n\n{listing(clean_up(joint))}\n"
    if os.environ.get("GOLDEN_UPDATE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
