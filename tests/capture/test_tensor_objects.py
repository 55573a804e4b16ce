"""Forward and loss see the model's own tensors: their attributes, identity, class and subclass decide as in eager."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import graphpp
from graphpp import CaptureError
from tests.distributed import run_ranks

WIDTH = 4
Made = tuple[nn.Module, Callable[..., Tensor]]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x + self.shift


class Scaled(nn.Linear):
    """Multiplies by an attribute of its weight, where the weight has one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "scale", 1.0) * (2.0 if hasattr(self.bias, "twice") else 1.0)


def attributes() -> Made:
    model = Layers()
    first, second = Scaled(WIDTH, WIDTH), Scaled(WIDTH, WIDTH)
    first.weight.scale, second.bias.twice = 3.0, None  # type: ignore[attr-defined]
    model.layers = nn.ModuleList([first, second])
    return model, F.mse_loss


def attribute_of_a_buffer() -> Made:
    model = Layers()
    model.shift.lengths = [3, 4]  # type: ignore[attr-defined]
    model.register_forward_hook(lambda module, args, output: output * sum(module.shift.lengths))
    return model, F.mse_loss


def penalised(weight_of: Callable[[Tensor], float], model: nn.Module) -> Made:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(weight_of(each) * each.square().sum() for each in model.parameters())

    return model, loss


def keys_of_a_dict() -> Made:
    model = Layers()
    weights: Mapping[Tensor, float] = {model.layers[0].weight: 3.0, model.layers[1].bias: 0.5}
    return penalised(lambda parameter: weights.get(parameter, 1.0), model)


def ids() -> Made:
    model = Layers()
    weights = {id(model.layers[1].weight): 3.0}
    return penalised(lambda parameter: weights.get(id(parameter), 1.0), model)


def members_of_a_set() -> Made:
    model = Layers()
    decayed = {model.layers[0].weight}
    return penalised(lambda parameter: 2.0 if parameter in decayed else 0.0, model)


def one_object() -> Made:
    model = Layers()
    shared = [model.layers[0].weight]
    return penalised(lambda parameter: 2.0 if parameter is shared[0] else 0.0, model)


def classes() -> Made:
    model = Layers()
    return penalised(lambda each: 2.0 if (type(each), type(model.shift)) == (nn.Parameter, Tensor) else 0.0, model)


class Moving(Layers):
    """Moves a layer to where it is, as Switch Transformers' router does."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].to(x.device)
        self.layers[1].to(dtype=torch.float32).float()
        return super().forward(x)


def moved_to_its_place() -> Made:
    return Moving(), F.mse_loss


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        before = self.shift
        self.shift += 1
        assert self.shift is before
        self.shift.mul_(2).add_(x.detach().mean(0))
        return super().forward(x)


def buffer_written_in_place() -> Made:
    return InPlace(), F.mse_loss


class Tripling(Tensor):
    """Weights that count three times in a linear layer."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *rest = args
            args = (x, 3 * weight, *rest)
        return super().__torch_function__(function, types, args, kwargs or {})


class Doubling(Tensor):
    """Overrides a method; results keep the class."""

    def t(self) -> Tensor:  # type: ignore[override]
        return super().t() * 2


class Transposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + 0.0).t()


def of_subclass(kind: type[Tensor], trained: bool, layer: type[nn.Linear] = nn.Linear) -> Callable[[], Made]:
    def made() -> Made:
        model = Layers()
        model.layers[0] = layer(WIDTH, WIDTH)
        model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().as_subclass(kind), requires_grad=trained)
        return model, F.mse_loss

    return made




MODELS = (
    attributes,
    attribute_of_a_buffer,
    keys_of_a_dict,
    ids,
    members_of_a_set,
    one_object,
    classes,
    moved_to_its_place,
    buffer_written_in_place,
    of_subclass(Tripling, trained=True),
    of_subclass(Tripling, trained=False),
    of_subclass(Doubling, trained=True, layer=Transposed),
)
X, TARGET = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()


def made_of(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    return make()


def state(model: nn.Module, loss: Tensor | None) -> list[Tensor]:
    assert loss is not None
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach().as_subclass(Tensor).clone() for each in (loss, *gradients, *model.buffers())]


@pytest.mark.parametrize("make", MODELS)
def test_model_and_loss_see_the_own_tensors_of_the_model(make: Callable[[], Made]) -> None:
    model, loss = made_of(make)
    expected = loss(model(X), TARGET)
    expected.backward()
    wanted = state(model, expected)
    model, loss = made_of(make)
    before = [*map(id, (*model.parameters(), *model.buffers()))]
    found = state(model, graphpp.compile(model, loss, split=1, microbatches=1).step(X, target=TARGET).loss)
    assert before == [*map(id, (*model.parameters(), *model.buffers()))]
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def stepped_twice(rank: int, names: list[int]) -> list[list[Tensor]]:
    """Losses of two steps and an evaluation on 2 ranks, after which each rank has its own part of the model only."""
    found = []
    for at in names:
        model, loss = made_of(MODELS[at])
        pipe = graphpp.compile(model, loss, split=["layers.1"], microbatches=1, debug=graphpp.Debug(audit=1))
        steps = [pipe.step(X, target=TARGET).loss for _ in range(2)]
        found.append([*steps, pipe.eval(X[:2], target=TARGET[:2]).loss])
    return found  # type: ignore[return-value]


def test_identity_survives_that_other_ranks_own_a_parameter() -> None:
    names = [MODELS.index(each) for each in (attributes, keys_of_a_dict, classes)]
    for at, losses in zip(names, run_ranks(stepped_twice, 2, names)[0], strict=True):
        model, loss = made_of(MODELS[at])
        with torch.no_grad():
            expected = [loss(model(X), TARGET), loss(model(X), TARGET), loss(model(X[:2]), TARGET[:2])]
        torch.testing.assert_close(losses, expected)


def test_a_trained_parameter_that_computes_itself_is_refused_by_name_and_class() -> None:
    model = Layers()
    model.layers[0].weight = nn.Parameter(TwoTensor(torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)))
    pipe = graphpp.compile(model, F.mse_loss, split=1)
    with pytest.raises(CaptureError, match=r"the parameter layers.0.weight is a TwoTensor, .* Freeze it"):
        pipe.step(X, target=TARGET)


class Branching(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


def test_attributes_act_beside_an_operator_with_a_body_and_other_subclasses_are_refused() -> None:
    layer = Scaled(WIDTH, WIDTH)
    layer.weight.scale = 3.0  # type: ignore[attr-defined]
    model = Branching(layer)
    with torch.no_grad():
        expected = F.mse_loss(model(X), TARGET)
    loss = graphpp.compile(model, F.mse_loss, split=1, microbatches=1).step(X, target=TARGET).loss
    torch.testing.assert_close(loss, expected)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tripling))
    with pytest.raises(CaptureError, match=r"layer.weight is a Tripling, .* torch.cond"):
        graphpp.compile(model, F.mse_loss, split=1).step(X, target=TARGET)


def test_a_wrapper_under_the_name_of_a_function_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.relu
    monkeypatch.setattr(F, "relu", lambda x, *rest, **more: original(x, *rest, **more) * 2)
    pipe = graphpp.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), F.mse_loss, split=1)
    with pytest.raises(CaptureError, match=r"relu of torch was replaced by .*test_tensor_objects.py:\d+.* its own name"):
        pipe.step(X, target=TARGET)


class Asking(nn.Module):
    """A model whose own code catches the errors of a question that a trace cannot answer, and then does without a layer."""

    def __init__(self, ask: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.ask, self.first, self.second = ask, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with contextlib.suppress(Exception):
            if self.ask(self, hidden):
                return self.second(hidden)
        return hidden


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, hidden: bool(torch.isfinite(hidden).all()),
        lambda model, hidden: int(hidden.detach().sum() * 0 + 1),
        lambda model, hidden: hidden.detach().numpy().size,
        lambda model, hidden: copy.deepcopy(hidden.detach()) is not None,
        lambda model, hidden: pickle.dumps(hidden.detach()),
        lambda model, hidden: torch.autograd.grad(hidden.sum(), model.first.weight, retain_graph=True),
        lambda model, hidden: model.first.weight.detach().numpy().size,
    ],
)
def test_an_error_of_the_trace_that_the_model_catches_is_refused(ask: Callable[[nn.Module, Tensor], Any]) -> None:
    pipe = graphpp.compile(Asking(ask), F.mse_loss, split=1)
    with pytest.raises(CaptureError, match=r"caught an error of the trace.*\n  at .*test_tensor_objects.py"):
        pipe.step(X, target=TARGET)
