"""A step's bookkeeping reads the tensors that the model has now, and calls hooks of trained parameters alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import graphpp


class Remembers(nn.Module):
    """Replaces a buffer that no operation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.last = y.detach().mean(0)
        return y


X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 4
MODELS: dict[str, Callable[[], nn.Module]] = {
    "a buffer that is written and not read": Remembers,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_buffers_and_parametrizations_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name](), nn.Tanh(), nn.Linear(4, 4))
    torch.manual_seed(0)
    eager = nn.Sequential(MODELS[name](), nn.Tanh(), nn.Linear(4, 4))
    pipe = graphpp.compile(model, F.cross_entropy, split=["2"], microbatches=2, schedule="GPipe")
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(3):
        loss = pipe.step(X, target=Y).loss
        parts = [F.cross_entropy(eager(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
        torch.stack(parts).mean().backward()
        torch.testing.assert_close(loss, torch.stack(parts).mean().detach())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (key, one), other in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=key)


def test_the_hook_of_a_frozen_parameter_rests() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
    pipe = graphpp.compile(model, F.cross_entropy, split=["2"], microbatches=2, schedule="GPipe")
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
    pipe.step(X, target=Y)
    assert calls == [1]
    model[0].weight.requires_grad_(False)  # with its gradient
    pipe.step(X, target=Y)
    assert calls == [1]
