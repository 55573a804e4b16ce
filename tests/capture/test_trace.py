"""The roles and metadata of a captured graph, the errors of capture, and that capture leaves the model unchanged."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.runtime import program as p
from tests.passes.graphs import captured, mean_square, run

D = 4
CPU = torch.device("cpu")
THIS = Path(__file__).name


def line_of(text: str) -> int:
    """The first line of this file that contains `text`."""
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


class Model(nn.Module):
    """A linear, an embedding, a BatchNorm, and a function that uses them; some parts are frozen or unused."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.other, self.unused = (nn.Linear(D, D) for _ in range(3))
        self.embedding = nn.Embedding(D, D)
        self.norm = nn.BatchNorm1d(D)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.register_buffer("state", torch.zeros(D))
        self.weights = torch.linspace(1, 2, D)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def inputs_of(joint: JointGraph, kind: type) -> list[Any]:
    return [role for role in joint.inputs() if isinstance(role, kind)]


def read_of(joint: JointGraph, kind: type) -> list[Any]:
    """The roles of the inputs that some node reads."""
    return [role for role, node in joint.inputs().items() if isinstance(role, kind) and node.users]


def outputs_of(joint: JointGraph, kind: type) -> list[Any]:
    return [role for role, _ in joint.outputs() if isinstance(role, kind)]


def of(function: Callable[[Any, Tensor], Any], **model: Any) -> JointGraph:
    net = Model(function)
    for name, value in model.items():
        setattr(net, name, value)
    return captured(net, torch.randn(2, D))


def check_numbers(net: nn.Module, x: Tensor) -> None:
    """Assert that loss and gradients of the joint graph are bit-equal to autograd's."""
    joint = captured(net, x)
    values = {p.Parameter(name): value.detach() for name, value in net.named_parameters()}
    values |= {p.Buffer(name): value.clone() for name, value in net.named_buffers()}
    values |= {p.Constant(name): value for name, value in joint.constants.items()}
    values |= {p.Input("args[0]"): x, p.Input("target"): torch.zeros(()), p.Seed(): torch.ones(())}
    with torch.no_grad():
        results = dict(zip([r for r, _ in joint.outputs()], run(joint, *map(values.get, joint.inputs())), strict=True))
    loss = mean_square(net(x), None)
    loss.backward()
    assert torch.equal(results.pop(p.Loss()), loss)
    for name, parameter in net.named_parameters():
        found = results.pop(p.Gradient(name), None)
        assert (found is None) == (parameter.grad is None)
        assert found is None or torch.equal(found, parameter.grad)
    for name, buffer in net.named_buffers():
        assert torch.equal(results.pop(p.BufferUpdate(name), buffer), buffer)
    assert not results


def test_inputs_and_results_have_roles() -> None:
    joint = of(lambda m, x: m.norm(m.linear(x)))
    verify_joint_graph(joint)
    names = ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [role.fqn for role in read_of(joint, p.Parameter)] == names
    assert {role.fqn for role in read_of(joint, p.Buffer)} == set(buffers)
    assert inputs_of(joint, p.Input) == [p.Input("args[0]"), p.Input("target")]
    assert inputs_of(joint, p.Seed) == [p.Seed()]
    assert outputs_of(joint, p.Loss) == [p.Loss()]
    assert [role.fqn for role in outputs_of(joint, p.Gradient)] == names
    assert {role.fqn for role in outputs_of(joint, p.BufferUpdate)} == set(buffers)
    assert set(joint.parameters) == {name for name, _ in Model(lambda m, x: x).named_parameters()}


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    net = Model(lambda m, x: m.other(m.linear(x)))
    net.linear.requires_grad_(False)
    joint = captured(net, torch.randn(2, D))
    assert [role.fqn for role in outputs_of(joint, p.Gradient)] == ["other.weight", "other.bias"]
    check_numbers(net, torch.randn(2, D))


def test_ties_are_found_by_identity_and_bear_the_first_name() -> None:
    net = Model(lambda m, x: m.other(m.linear(x)) @ m.embedding.weight)
    net.other.weight = net.embedding.weight = net.linear.weight
    joint = captured(net, torch.randn(2, D))
    assert [role.fqn for role in read_of(joint, p.Parameter)] == ["linear.weight", "linear.bias", "other.bias"]
    assert not {"other.weight", "embedding.weight"} & {role.fqn for role in inputs_of(joint, p.Parameter)}
    gradients = [role.fqn for role in outputs_of(joint, p.Gradient)]
    assert sorted(gradients) == ["linear.bias", "linear.weight", "other.bias"]


def in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.mul_(0.9).add_(x.mean(0))
    return m.linear(x) + m.state


def assigned(m: Any, x: Tensor) -> Tensor:
    seen = m.linear(x) * (m.state + 1)
    m.state = m.state * 0.5 + seen.mean(0)
    return seen


def both(m: Any, x: Tensor) -> Tensor:
    m.state.add_(1)
    m.state = m.state * 2
    return m.linear(x) + m.state


@pytest.mark.parametrize("function", [in_place, both, lambda m, x: m.norm(m.linear(x))])
def test_buffers_that_the_forward_writes_are_results(function: Callable[[Any, Tensor], Tensor]) -> None:
    check_numbers(Model(function), torch.randn(2, D))


def test_a_buffer_that_is_assigned_is_a_result_and_no_gradient_flows_into_it() -> None:
    net = Model(assigned)
    joint = captured(net, torch.randn(2, D))
    assert outputs_of(joint, p.BufferUpdate) == [p.BufferUpdate("state")]
    assert torch.equal(net.state, torch.zeros(D))
    assert "state" in net._buffers


def grown(m: Any, x: Tensor) -> Tensor:
    m.state = torch.cat([m.state, x[0]])
    return m.linear(x)


def replaced(m: Any, x: Tensor) -> Tensor:
    m.weights = m.weights * 2
    return m.linear(x) * m.weights


REFUSED_STATE = [
    (grown, r"buffer state is \[4\] torch.float32, and the forward assigns \[8\]"),
    pytest.param(
        replaced,
        "reads the tensor weights and replaces it.*register_buffer",
        marks=pytest.mark.xfail(torch.__version__.startswith("2.11."), reason="torch raises its own error first", strict=True),
    ),
    (lambda m, x: m.linear(x.add_(1)), "writes in place into an input of the model"),
]


@pytest.mark.parametrize(("function", "said"), REFUSED_STATE)
def test_state_that_would_be_lost_is_refused(function: Callable[[Any, Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        of(function)


def test_a_tensor_left_behind_in_an_attribute_does_no_harm() -> None:
    def leaving(m: Any, x: Tensor) -> Tensor:
        m.seen, m.linear.seen = x * 2, x * 3
        return m.linear(x) + m.seen

    net = Model(leaving)
    captured(net, torch.randn(2, D))
    assert not hasattr(net, "seen")
    assert not hasattr(net.linear, "seen")


def test_tensors_held_by_model_and_loss_are_constants() -> None:
    held = torch.linspace(2, 3, D)
    net = Model(lambda m, x: m.linear(x) * m.weights * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    loss = lambda output, target: (output * held).sum()  # noqa: E731
    joint = capture(net, loss, Microbatch((torch.randn(2, D),), {}, torch.zeros(())), CPU).joint
    verify_joint_graph(joint)
    values = list(joint.constants.values())
    assert {role.name for role in inputs_of(joint, p.Constant)} == set(joint.constants)
    assert any(value is held for value in values)
    assert any(value is net.weights for value in values)
    assert len(values) == 3
    check_numbers(net, torch.randn(2, D))


def test_without_a_loss_the_outputs_own_is_taken() -> None:
    answers = [lambda loss: {"loss": loss}, lambda loss: SimpleNamespace(loss=loss)]
    for answer in answers:
        joint = captured(Model(lambda m, x, answer=answer: answer(m.linear(x).sum())), torch.randn(2, D), loss=None)
        assert outputs_of(joint, p.Loss) == [p.Loss()]
        assert inputs_of(joint, p.Input) == [p.Input("args[0]")]


NO_LOSS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, x: m.linear(x), "returned Tensor without one"),
    (lambda m, x: {"logits": m.linear(x)}, "returned dict without one"),
    (lambda m, x: {"loss": m.linear(x)}, r"must be a scalar tensor, got shape \(2, 4\)"),
    (lambda m, x: {"loss": 1.0}, "must be a scalar tensor, got float"),
    (lambda m, x: {"loss": m.linear(x).detach().sum()}, "does not depend on any parameter"),
    (lambda m, x: {"loss": x.sum()}, "does not depend on any parameter"),
]


@pytest.mark.parametrize(("function", "said"), NO_LOSS)
def test_what_is_no_loss_is_refused(function: Callable[[Any, Tensor], Any], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        captured(Model(function), torch.randn(2, D), loss=None)


def calls(joint: JointGraph) -> list[str]:
    """All module calls, in order of their first operation."""
    return list(dict.fromkeys(call for node in joint.computed() for call in node.meta["calls"]))


def test_every_operation_knows_its_module_calls() -> None:
    joint = of(lambda m, x: m.layers[1](m.layers[0](x)))
    assert calls(joint) == ["layers.0", "layers.0.0", "layers.0.1", "layers.1", "layers.1.0", "layers.1.1"]


def test_backward_operations_bear_the_call_of_their_twins() -> None:
    joint = of(lambda m, x: m.other(m.linear(x).tanh()))
    backward = {call for node in joint.computed() if node.meta["backward"] for call in node.meta["calls"]}
    assert backward == {"linear", "other"}


def test_operations_know_the_line_of_the_forward_that_made_them() -> None:
    """The line is one of `forward`, not the innermost one: export keeps the frames of `forward` methods only."""
    joint = of(lambda m, x: m.linear(x).erfinv())
    expected = rf".*{THIS}:{line_of('return self.function(self, x)')}"
    found = [node.meta["source"] for node in joint.computed() if node.target is torch.ops.aten.erfinv.default]
    assert re.fullmatch(expected, found[0])


def test_a_meta_model_is_captured_like_any_other() -> None:
    def texts(net: nn.Module) -> list[str]:
        return [str(node) + str(node.meta["val"].device) for node in captured(net, torch.randn(2, D)).graph.nodes
                if isinstance(node.meta["val"], Tensor)]  # fmt: skip

    function = lambda m, x: m.norm(m.layers[0](m.linear(x)))  # noqa: E731
    assert texts(Model(function).to("meta")) == texts(Model(function))


def snapshot(net: nn.Module) -> list[Any]:
    """All state of a model that a capture could change: objects by identity, flags, values."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return [
        [(name, id(tensor), tensor.requires_grad, tensor.grad, tensor._version) for name, tensor in tensors],
        [(name, module.training, sorted(vars(module))) for name, module in net.named_modules()],
        {name: id(module) for name, module in net.named_modules()},
    ]


@pytest.mark.parametrize("function", [in_place, assigned, replaced, lambda m, x: F.dropout(m.norm(m.linear(x)))])
def test_capture_leaves_the_model_as_it_was(function: Callable[[Any, Tensor], Tensor]) -> None:
    net = Model(function)
    net.other.eval()
    net.linear.bias.requires_grad_(False)
    before, values = snapshot(net), copy.deepcopy(net.state_dict())
    x, random = torch.randn(2, D), torch.get_rng_state()
    held = x.clone()
    for training in (True, False):
        try:
            capture(net, mean_square, Microbatch((x,), {}, torch.zeros(())), CPU, training=training)
        except CaptureError:
            assert function is replaced
    assert snapshot(net) == before
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    assert torch.equal(x, held)
    assert torch.equal(torch.get_rng_state(), random)


@torch.library.custom_op("graphpp_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 5)  # not 2, so that it differs from the derivative of the forward


def test_control_flow_by_values_names_the_line() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        if m.linear(x).sum() > 0:  # decided here
            return x
        return m.linear(x)

    with pytest.raises(CaptureError, match="must not steer Python") as caught:
        of(function)
    assert f"{THIS}:{line_of('# decided here')} in function" in str(caught.value)
