"""Models whose gradients a trace would lose are refused by name and line; models that only look like them work as in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import CaptureError

WIDTH = 4


class Net(nn.Module):
    """Two layers, a buffer, a plain tensor, and trainable tensors that are no parameters of the module."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.listed = [nn.Parameter(torch.ones(WIDTH))]
        self.loose, self.table = torch.ones(WIDTH, requires_grad=True), torch.arange(float(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def under_inference_mode(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        aim = net.first(x)
    return net.second(net.first(x)) + aim.clone()


decorated = torch.inference_mode()(lambda net, x: net.first(x))


def reading_data(net: Net, x: Tensor) -> Tensor:
    return net.second(net.first(x)) + net.first.weight.data.sum() + net.first(x).data


def writing_into_data_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.mean.data.mul_(0.5).add_(x.mean(0))
    return net.second(net.first(x)) + net.mean


def node_hook(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    y.grad_fn.register_hook(lambda *_: None)
    return net.second(y)


def late_hook(net: Net, x: Tensor) -> Tensor:
    net.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    return net.second(net.first(x))


def freezing(net: Net, x: Tensor) -> Tensor:
    net.first.requires_grad_(False)
    y = net.second(net.first(x))
    net.first.requires_grad_(True)
    return y


def freezing_by_attribute(net: Net, x: Tensor) -> Tensor:
    net.first.weight.requires_grad = False
    return net.second(net.first(x))


def assigning_data(net: Net, x: Tensor) -> Tensor:
    net.mean.data = x.mean(0)
    return net.second(net.first(x)) + net.mean


class ByConstant(torch.autograd.Function):
    """Writes into a result of a constant in an object, as the 4-bit layers of quantisation libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: list[Tensor]) -> Tensor:
        ctx.state = state
        return x * scale_of(state[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * scale_of(ctx.state[0]), None


def scale_of(table: Tensor) -> Tensor:
    scale = table * 2
    scale += 1
    scale[0] = 5.0
    return scale


AS_EAGER = {
    "writing into a result of a constant": lambda net, x: net.second(net.first(x) * scale_of(net.table)),
    "writing into a result of a constant in a Function": lambda net, x: net.second(ByConstant.apply(net.first(x), [net.table])),
    "inference mode": under_inference_mode,
    "inference mode as decorator": lambda net, x: net.second(net.first(x)) + decorated(net, x).clone(),
    "reading data": reading_data,
    "writing into data of a buffer": writing_into_data_of_a_buffer,
    "requires_grad_ of a value that has it": lambda net, x: net.second(net.first(x).requires_grad_()),
}
BY_WRITE = rf"(?s) at {__file__}:.*write into a clone\(\) of it"
REFUSED = {
    "writing into a constant": (lambda net, x: net.second(net.first(x) + net.table.add_(1)), BY_WRITE),
    "writing into a view of a constant": (lambda net, x: net.first(x) + net.table[1:].add_(1).sum(), BY_WRITE),
    "writing into a constant by a value": (lambda net, x: net.first(x) + net.table.add_(x.sum(0)), BY_WRITE),
    "parameter in a list": (lambda net, x: net.second(net.first(x) * net.listed[0]), r"shape \[4\] that requires grad"),
    "leaf in an attribute": (lambda net, x: net.second(net.first(x) * net.loose), r"shape \[4\] that requires grad"),
    "hook on an autograd node": (node_hook, rf"grad_fn\) at {__file__}"),
    "hook on a gradient": (late_hook, rf"register_post_accumulate_grad_hook at {__file__}"),
    "freezing": (freezing, rf"requires_grad at {__file__}"),
    "freezing by attribute": (freezing_by_attribute, rf"requires_grad at {__file__}"),
    "assigning data": (assigning_data, rf"assigns to .data at {__file__}"),
    "writing into data of a parameter": (
        lambda net, x: net.second(net.first(x)) + net.first.weight.data.clamp_(-1, 1).sum(),
        r"in place into first.weight",
    ),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize("name", AS_EAGER)
def test_as_in_eager(name: str) -> None:
    net, eager, (x, target) = Net(AS_EAGER[name]), Net(AS_EAGER[name]), batch()
    graphpp.compile(net, F.mse_loss, split=["second"], microbatches=2).step(x, target=target)
    for part, aim in zip(x.chunk(2), target.chunk(2), strict=True):
        (F.mse_loss(eager(part), aim) / 2).backward()
    assert torch.equal(net.mean, eager.mean)
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:.*requires gradient")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, words = REFUSED[name]
    net, (x, target) = Net(function), batch()
    with pytest.raises(CaptureError, match=words):
        graphpp.compile(net, F.mse_loss).step(x, target=target)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    net.mean.data = net.mean.data + 1  # torch itself is unpatched again
    with torch.inference_mode():
        assert net.first(x).is_inference()


def test_hooks_on_the_backward_of_modules_are_refused() -> None:
    net, (x, target) = Net(lambda net, x: net.second(net.first(x))), batch()
    net.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="the module first has backward hooks"):
        graphpp.compile(net, F.mse_loss).step(x, target=target)


def test_modules_that_cannot_be_traced_are_refused_by_name() -> None:
    x, target = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2, WIDTH)
    for module, words in ((nn.LazyLinear(WIDTH), "the module 0 is lazy"), (nn.Embedding(5, WIDTH, sparse=True), "sparse=True")):
        with pytest.raises(CaptureError, match=words):
            graphpp.compile(nn.Sequential(module), F.mse_loss).step(x, target=target)


class Hiding(nn.Sequential):
    """Overrides `named_parameters` to list trained parameters only."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in super().named_parameters(*args, **kwargs) if value.requires_grad)


def test_parameters_that_are_not_listed_are_refused() -> None:
    model, (x, target) = Hiding(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    model[0].bias.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"leaves out 0\.bias"):
        graphpp.compile(model, F.mse_loss).step(x, target=target)


class Scaled(nn.Linear):
    """Has a matrix product in the model's own forward, outside of any submodule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight


def test_a_product_of_two_dtypes_is_found_where_it_stands() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y @ target.T.double()).sum()

    x, target = batch()
    with pytest.raises(CaptureError, match=rf"mm.default at {__file__}:\d+ multiplies values of float32 and float64"):
        graphpp.compile(Scaled(WIDTH, WIDTH), F.mse_loss).step(x, target=target)
    with pytest.raises(CaptureError, match=r"mm\.default in the loss multiplies values of float32 and float64"):
        graphpp.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH)), loss).step(x, target=target)


class WrittenAlias(nn.Module):
    """A buffer that the forward writes, and other tensors over the same memory."""

    def __init__(self, view: str, start: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        memory = torch.ones(8)
        self.register_buffer("total", memory[:4])
        if view == "buffer":
            self.register_buffer("view", memory[start : start + 4])
        elif view == "parameter":
            self.view = nn.Parameter(memory[start : start + 4])
        else:
            self.view = memory[start : start + 4]  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)  # type: ignore[operator]
        return self.layer(x) + self.view + self.total


@pytest.mark.parametrize("view", ["buffer", "parameter", "attribute"])
def test_a_written_buffer_with_a_view_elsewhere_is_refused(view: str) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(graphpp.CaptureError, match=r"writes the buffer total, and .* is a view of the same memory"):
        graphpp.compile(WrittenAlias(view, start=2), nn.functional.mse_loss, microbatches=1).step(x, target=x)


@pytest.mark.parametrize("view", ["buffer", "parameter", "attribute"])
def test_buffers_in_parts_of_one_memory_are_accepted(view: str) -> None:
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    model = WrittenAlias(view, start=4)
    torch.manual_seed(0)
    plain = WrittenAlias(view, start=4)
    result = graphpp.compile(model, nn.functional.mse_loss, microbatches=1).step(x, target=x)
    assert torch.equal(result.loss, nn.functional.mse_loss(plain(x), x).detach())
    assert torch.equal(model.total, plain.total)  # type: ignore[arg-type]
