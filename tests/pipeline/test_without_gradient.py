"""Parameters that require a gradient and get none are named once, and `print(pipe)` counts the trained ones."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks

WIDTH = 4


class Model(nn.Module):
    """Four layers; `between` is called with the result of the second. `tied`: the first and the last layer share a weight."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x).tanh()
            x = self.between(x) if at == 1 else x
        return x


class Unused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)


class Quiet(Model):
    """The first two layers run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x))


def frozen() -> Model:
    model = Model(Tensor.detach)
    model.layers[:2].requires_grad_(False)
    return model


FIRST = [f"layers.{at}.{name}" for at in range(2) for name in ("weight", "bias")]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("made", "named", "trained"),
    [
        (lambda: Model(Tensor.detach), FIRST, [0, 40]),
        (Quiet, FIRST, [0, 40]),
        (lambda: Model(Tensor.detach, tied=True), [*FIRST[1:]], [16, 40]),
        (Unused, ["never.weight", "never.bias"], [40, 40]),
        (frozen, [], [0, 40]),
        (Model, [], [40, 40]),
    ],
    ids=["detach", "no grad", "tied", "unused", "frozen", "all"],
)
def test_parameters_without_a_gradient_are_named_once(
    made: Callable[[], Model], named: list[str], trained: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = made(), torch.randn(4, WIDTH)
    pipe = graphpp.compile(model, F.mse_loss, split=["layers.2"], microbatches=2)
    with caplog.at_level(logging.WARNING, logger="graphpp"):
        pipe.eval(x, target=x)
        assert " trained " in str(pipe) and [stage.trained for stage in pipe.plan.stages] == [None, None]
        pipe.step(x, target=x)
        pipe.step(x[:2], target=x[:2])
    assert {name for name, each in model.named_parameters() if each.requires_grad and each.grad is None} == set(named)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(named)
    if named:
        assert f"they require one: {', '.join(named)}" in texts[0]
        assert ("stage 0 is not trained at all" in texts[0]) == (trained[0] == 0)
    given = graphpp.Microbatch((x[:2],), target=x[:2])
    train = graphpp.compile(model, F.mse_loss, split=["layers.2"], microbatches=2, example=given)
    assert [stage.trained for stage in train.plan.stages] == trained
    assert bool(named) == ("no gradient reaches" in str(train))


def said_by(rank: int) -> list[str]:
    """What a rank of two replicas logs."""
    torch.set_num_threads(1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphpp").addHandler(handler)
    mesh, x = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_replicate")), torch.zeros(4, WIDTH)
    torch.manual_seed(0)
    graphpp.compile(Model(torch.sin, tied=True), F.mse_loss, mesh=mesh).step(x, target=x)
    torch.manual_seed(0)
    graphpp.compile(Unused(), F.mse_loss, mesh=mesh).step(x, target=x)
    return said


def test_one_rank_of_all_replicas_names_them() -> None:
    first, second = run_ranks(said_by, 2)
    assert len(first) == 1 and "never.weight" in first[0] and second == []
