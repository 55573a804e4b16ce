"""Operations that read a written buffer after the forward read a copy of its old value; others read the buffer itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpp.passes.graph.joint_graph import verify_joint_graph
from graphpp.passes.joint.clean_up import clean_up
from graphpp.passes.joint.snapshot_buffers import snapshot_buffers
from graphpp.runtime import program
from tests.passes.graphs import captured

D = 4


class State(nn.Module):
    """A linear and two buffers; the function `step` reads and writes them."""

    def __init__(self, step: Callable[[State, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("a", torch.ones(D))
        self.register_buffer("b", torch.zeros(D))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, self.linear(x))


def only_read(m: State, h: Tensor) -> Tensor:
    return h * m.a


def batch_norm(m: State, h: Tensor) -> Tensor:
    return m.norm(h)


def read_at_once(m: State, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.mul_(0.5).add_(h.mean(0))
    return h + m.a


def read_by_the_backward(m: State, h: Tensor) -> Tensor:
    seen = h * m.a
    m.a = m.a * 0.5
    return seen


def viewed(m: State, h: Tensor) -> Tensor:
    seen = h + m.a.view(1, D)
    m.a = m.a * 0.5
    return seen


def handed_on(m: State, h: Tensor) -> Tensor:
    seen = h + m.b
    m.a, m.b = m.b, m.a
    return seen


# how a state is used -> which buffers are copied, how many copies
CASES: list[tuple[Callable[[State, Tensor], Tensor], list[str]]] = [
    (only_read, []),
    (batch_norm, []),
    (read_at_once, []),
    (read_by_the_backward, ["a"]),
    (viewed, ["a"]),
    (handed_on, ["a", "b"]),
]


@pytest.mark.parametrize(("step", "copied"), CASES)
def test_only_late_readers_get_a_copy(step: Callable[[State, Tensor], Tensor], copied: list[str]) -> None:
    joint = clean_up(captured(State(step), torch.randn(3, D)))
    before = set(joint.computed())
    snapshot_buffers(joint)
    verify_joint_graph(joint)
    copies = [node for node in joint.computed() if node not in before]
    assert {str(node.target) for node in copies} <= {"aten.clone.default"}
    assert sorted(node.args[0].meta["role"].fqn for node in copies) == copied  # type: ignore[union-attr]
    assert not any(node.meta["backward"] for node in copies)
    for role, value in joint.outputs():
        assert value.op != "placeholder" or not isinstance(role, program.BufferUpdate)


def test_a_copy_is_made_before_the_first_that_reads_it_late() -> None:
    joint = snapshot_buffers(clean_up(captured(State(viewed), torch.randn(3, D))))
    order = list(joint.graph.nodes)
    (copy,) = (node for node in order if str(node.target) == "aten.clone.default")
    assert all(order.index(copy) < order.index(user) for user in copy.users)
