"""What happens between steps or behind the graph's back: it is followed, or refused, and never trains something else."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import compiler

X, Y = torch.randn(8, 8), torch.randn(8, 8)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8))


def eager_grads(model: nn.Module, microbatches: int = 4) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    for x, y in zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True):
        (F.mse_loss(model(x), y) / microbatches).backward()
    return {fqn: p.grad for fqn, p in model.named_parameters()}


def assert_like_eager(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[fqn]), fqn


# ------------------------------------------------------------------------------------------------ hooks and memory


class HooksInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y


def hooked(register: Callable[[nn.Parameter], Any]) -> nn.Module:
    model = two_layers()
    register(model[2].weight)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (hooked(lambda p: p.register_hook(torch.zeros_like)), "2.weight"),
        (hooked(lambda p: p.register_post_accumulate_grad_hook(lambda p: None)), "2.weight"),
        (nn.Sequential(HooksInside(8, 8)), "test_changes.py"),
    ],
)
def test_gradient_hooks_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(graphpp.CaptureError, match=says):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)


def test_hooks_work_again_after_capture() -> None:
    graphpp.compile(two_layers(), F.mse_loss).step(X, target=Y)
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(seen.append)
    (x * 3).sum().backward()
    assert len(seen) == 1


class HooksAtFirstCall(nn.Linear):
    """Installs a forward hook when it is first called, as transformers does to collect router logits."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.register_forward_hook(lambda module, args, output: 2 * output)
            self.installed = True
        return super().forward(x)


def test_a_hook_that_the_forward_registers_does_not_outlive_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    capture = compiler.capture
    monkeypatch.setattr(compiler, "capture", lambda *args, **options: captures.append(1) or capture(*args, **options))
    model = nn.Sequential(HooksAtFirstCall(8, 8), nn.Linear(8, 8))
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    for _ in range(3):
        pipe.step(X, target=Y)
    assert len(captures) == 1
    assert not model[0]._forward_hooks and not model[0].installed


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = two_layers()
    model[2].weight.data = model[0].weight.data
    with pytest.raises(graphpp.CaptureError, match=r"0\.weight and 2\.weight"):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)


# ------------------------------------------------------------------------------------------------ a model that changes


def untie(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(8, 8))


def exchange(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 8)


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


@pytest.mark.parametrize(("tied", "change"), [(True, untie), (False, tie), (False, exchange), (True, exchange)])
def test_another_structure_is_refused(tied: bool, change: Callable[[nn.Sequential], None]) -> None:
    model = two_layers()
    if tied:
        tie(model)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    pipe.step(X, target=Y)
    change(model)
    with pytest.raises(graphpp.GraphPPError, match="changed after"):
        pipe.step(X, target=Y)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = 1.0
        self.mask = torch.ones(8)
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale * self.mask
        return y.relu() if self.flag else y


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("mask", torch.zeros(8)), ("flag", True)])
def test_another_attribute_is_followed(name: str, value: Any) -> None:
    model = Scaled()
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    pipe.step(X, target=Y)
    model.zero_grad()
    setattr(model, name, value)
    pipe.step(X, target=Y)
    assert_like_eager(model, eager_grads(model_without_grads(model)))


def model_without_grads(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.zero_grad()
    return model


def test_a_replaced_parameter_is_followed() -> None:
    model = two_layers()
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    pipe.step(X, target=Y)
    model.zero_grad()
    model[0].weight = nn.Parameter(torch.randn(8, 8))
    expected = eager_grads(model)
    pipe.step(X, target=Y)
    assert_like_eager(model, expected)


# ------------------------------------------------------------------------------------------------ memory of gradients


class Reread(nn.Module):
    """The gradient of `whole` is read again, through a view, after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(8, 8, 1) * 0.3)
        self.left, self.right = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.whole + (self.right @ self.left).view(8, 8, 1)
        return self.out(torch.tanh(F.conv1d(x.unsqueeze(-1), weight).squeeze(-1)))


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
def test_a_gradient_is_not_added_to_while_it_is_read(schedule: str) -> None:
    torch.manual_seed(0)
    model = Reread()
    expected = eager_grads(model)
    graphpp.compile(model, F.mse_loss, split=["out"], schedule=schedule, microbatches=4).step(X, target=Y)
    assert_like_eager(model, expected)


def test_outputs_of_an_evaluation_are_handed_over() -> None:
    pipe = graphpp.compile(two_layers(), F.mse_loss, microbatches=4)
    out = pipe.eval(X)
    held = weakref.ref(out.output)
    tensors = sum(t.shape == (2, 8) for t in gc.get_objects() if type(t) is Tensor)
    del out
    assert held() is None
    pipe.eval(X)
    gc.collect()
    assert sum(t.shape == (2, 8) for t in gc.get_objects() if type(t) is Tensor) <= tensors


# ------------------------------------------------------------------------------------------------ what is the batch


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.inner(x) @ bias


def test_an_example_tells_what_has_no_batch_dimension() -> None:
    model, bias = Biased(), torch.randn(8, 8)
    example = graphpp.Microbatch((X[:1], bias), target=Y[:1])
    expected = eager_biased(model, bias)
    graphpp.compile(model, F.mse_loss, microbatches=8, example=example).step(X, bias, target=Y)
    assert torch.equal(model.inner.weight.grad, expected)


def eager_biased(model: Biased, bias: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    for x, y in zip(X.chunk(8), Y.chunk(8), strict=True):
        (F.mse_loss(model(x, bias), y) / 8).backward()
    return model.inner.weight.grad


def test_a_batch_of_the_examples_shape_is_refused() -> None:
    pipe = graphpp.compile(two_layers(), F.mse_loss, microbatches=4, example=graphpp.Microbatch((X,), target=Y))
    with pytest.raises(graphpp.BatchError, match="one microbatch"):
        pipe.step(X, target=Y)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, position_ids: Tensor, x: Tensor) -> Tensor:
        return x + self.table(position_ids)


def test_the_first_tensor_does_not_decide_alone() -> None:
    pipe = graphpp.compile(Positions(), F.mse_loss, microbatches=8)
    rows = torch.randn(4, 8, 8)
    with pytest.raises(graphpp.BatchError, match="a batch of 4"):
        pipe.step(position_ids=torch.arange(8), x=rows, target=rows)


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("row", ["0F0 0I0 0W0", "0UNSHARD 0F0 0B0", "0F0 0B0 0REDUCE_GRAD"])
def test_actions_that_nothing_runs_are_refused(row: str) -> None:
    with pytest.raises(graphpp.ScheduleError, match="cannot be run yet"):
        graphpp.compile(two_layers(), F.mse_loss, schedule=[row.split()], microbatches=1).step(X, target=Y)
