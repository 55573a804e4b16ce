"""`nn.LSTM`, `nn.GRU`, `nn.RNN` as single operators, and the dropout between their layers, which torch's decomposition loses.

A dropout of 1 is deterministic, so that the numbers must be eager's.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from tests.exhaustive import further
from tests.internals import captures
from tests.models import Batch
from tests.reference import eager_steps, gradients
from tests.training import local_grads

FLAGS = [{"bidirectional": both, "batch_first": first, "bias": both} for both, first in ((False, True), (True, False))]


class Recurrent(nn.Module):
    """Three recurrent layers; the loss reads the output and the final states."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layers(self.first(x))
        states = state if isinstance(state, tuple) else (state,)
        return output.pow(2).sum() + sum(part.sin().sum() for part in states)


def only_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


KINDS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (nn.LSTM, {}), (nn.LSTM, {"proj_size": 2}), (nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("kind", "options", "flags"),
    [(*kind, FLAGS[index]) for index, kind in enumerate(KINDS[:2])]
    + further(*((*kind, FLAGS[index % 2]) for index, kind in enumerate(KINDS[2:])))
    + further(*((*kind, FLAGS[1 - index % 2]) for index, kind in enumerate(KINDS))),
)
def test_every_layer_but_the_last_is_dropped(
    kind: type[nn.Module], options: dict[str, Any], flags: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind(4, 4, 3, dropout=1.0, **options, **flags))
    batch = Batch((torch.randn(2, 3, 4),), {}, torch.zeros(2))
    eager = eager_steps(model, only_loss, [batch], 1, 1, None)
    pipe = graphpp.compile(model, only_loss, split=["layers"], schedule="GPipe", microbatches=1)
    losses = pipe.step(*batch.args, target=batch.target).losses
    torch.testing.assert_close(losses, eager.losses[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients(model), eager.grads[0], rtol=1e-4, atol=1e-6)


class First(nn.Module):
    """An LSTM over the model's input, which requires no gradient."""

    def __init__(self, frozen: bool, **options: Any) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, batch_first=True, **options).requires_grad_(not frozen)
        self.last = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x)[0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{}, *further({"num_layers": 2, "bidirectional": True}, {"bias": False})])
def test_an_lstm_that_comes_first_learns(options: dict[str, Any], frozen: bool) -> None:
    torch.manual_seed(0)
    model, x, target = First(frozen, **options), torch.randn(4, 5, 8), torch.randn(4, 5, 4)
    model(x)
    eager = eager_steps(model, nn.functional.mse_loss, [Batch((x,), {}, target)], 2, 1, None)
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=["last"], schedule="GPipe", microbatches=2)
    pipe.step(x, target=target)
    for name, grad in gradients(model).items():
        expected = eager.grads[0][name]
        assert (grad is None) == (expected is None)
        assert grad is None or expected is None or (grad - expected).norm() <= 1e-6 * expected.norm()
    torch.testing.assert_close(pipe.eval(x).output, model(x), rtol=1e-5, atol=1e-6)


def in_lengths() -> list[tuple[list[bool], int]]:
    """For each recurrence: whether losses and gradients are eager's at 3, 5 and 7 time steps, and the captures of the last."""
    found = []
    for kind, mixed in ((nn.GRU, False), (nn.GRU, True), (nn.LSTM, True)):
        torch.manual_seed(0)
        model, same = nn.Sequential(nn.Linear(8, 8), kind(8, 8, batch_first=True), Last()), []
        eager, names = deepcopy(model), [name for name, _ in model.named_parameters()]
        with captures() as made, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            pipe = graphpp.compile(model, nn.functional.mse_loss, split=["1"], schedule="1F1B", microbatches=1)
            for steps in (3, 5, 7):
                x, target, before = torch.randn(4, steps, 8), torch.randn(4, steps, 8), len(made)
                loss = nn.functional.mse_loss(eager(x), target)
                expected = dict(zip(names, torch.autograd.grad(loss, list(eager.parameters())), strict=True))
                if steps > 3:
                    pipe.zero_grad()
                same.append(bool(torch.allclose(pipe.step(x, target=target).losses[0], loss, rtol=1e-6)))
                for name, grad in local_grads(pipe).items():
                    assert grad is not None
                    same.append(bool((grad - expected[name]).norm() <= 1e-5 * expected[name].norm()))
        found.append((same, len(made) - before))
    return found


class Last(nn.Module):
    """A linear map of a recurrence's output."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, results: tuple[Tensor, Any]) -> Tensor:
        mapped: Tensor = self.map(results[0])
        return mapped


@pytest.mark.exhaustive
def test_one_graph_serves_every_length() -> None:
    for same, graphs in in_lengths():
        assert len(same) == 3 * 9 and all(same)
        assert graphs == 0  # the second length was captured for all
