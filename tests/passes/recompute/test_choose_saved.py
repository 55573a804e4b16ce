"""The choice of saved values changes no bit of a step, and no memory is saved twice or although it is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase
from graphpp.runtime.task import Task
from tests.exhaustive import cases
from tests.fuzz.harness import shuffled
from tests.training import capturing_once

D, MICROBATCHES = 8, 4
NOTHING = graphpp.Recompute(layers=(), free=False)  # every value that the backward reads is saved
CHOICES = {"free": None, "half": 0.5, "tenth": 0.1, "selective": "selective", "full": "full"}


class Layer(nn.Module):
    """Attention written out, with dropout, a norm, a gated MLP."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mix = norm(D), nn.Linear(D, 3 * D)
        self.up, self.down, self.drop = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = self.drop(torch.softmax(query @ key.transpose(-1, -2) / D**0.5, -1))
        x = x + scores @ value
        return x + self.drop(self.down(F.gelu(self.up(x)) * x.repeat(1, 2)))


class Net(nn.Module):
    """Three layers; `tied`: the last `down` is the first; `frozen`: the second layer's parameters; `cast`: autocast."""

    def __init__(
        self, norm: type[nn.Module] = nn.LayerNorm, *, tied: bool = False, frozen: bool = False, cast: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(3))
        self.cast = cast
        if tied:
            self.layers[2].down.weight = self.layers[0].down.weight
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            for layer in self.layers:
                x = layer(x)
        return x.float()


MODELS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "buffers": {"norm": nn.BatchNorm1d},
    "casts": {"cast": True},
}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.fixture(autouse=True)
def small_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every cheap operation run again, however small its value: the models here are tiny."""
    monkeypatch.setattr("graphpp.planner.recompute_policy._WORTH", 1e12)


def made(name: str, recompute: Any, schedule: Any = "1F1B") -> tuple[graphpp.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = Net(**MODELS[name])
    given = MICROBATCHES if isinstance(schedule, str) else None
    pipe = graphpp.compile(
        model, mean_square, split=["layers.1"], schedule=schedule, microbatches=given, memory=recompute
    )
    return pipe, model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, D, generator=generator), torch.randn(16, D, generator=generator)


def numbers(pipe: graphpp.Pipeline, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The losses, gradients and buffers of two steps."""
    torch.manual_seed(2)
    inputs, target = batch()
    for step in range(2):
        losses = pipe.step(inputs, target=target).losses
        assert losses is not None
        yield f"losses of step {step}", losses
    yield from ((fqn, q.grad) for fqn, q in model.named_parameters() if q.grad is not None)
    yield from model.named_buffers()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", cases(MODELS, "tied", "buffers"))
def test_no_choice_changes_a_bit(name: str) -> None:
    with capturing_once():
        expected = dict(numbers(*made(name, NOTHING)))
        for choice, recompute in CHOICES.items():
            found = dict(numbers(*made(name, recompute, shuffled(2, MICROBATCHES, 5))))  # some backwards as B, some as I, W
            assert found.keys() == expected.keys()
            wrong = [what for what, value in found.items() if not torch.equal(value, expected[what])]
            assert not wrong, f"{choice}: {wrong}"


@pytest.mark.parametrize("recompute", [None, 0.5, "full"])
def test_no_memory_is_saved_twice_or_beside_what_is_at_hand(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def file(task: Task, results: Any) -> None:
        nonlocal seen
        if task.key.phase is Phase.FORWARD:
            pairs = zip(task.program.outputs, results, strict=True)
            roles = [(role, value) for role, value in pairs if isinstance(role, p.Saved)]
            memories = [value.untyped_storage().data_ptr() for _, value in roles]
            assert len(set(memories)) == len(memories), "two saved values with one memory"
            assert not set(memories) & held, "a parameter or an input is saved"
            seen += len(memories)
        usual(task, results)

    usual = Task.file
    monkeypatch.setattr(Task, "file", file)
    pipe, model = made("buffers", recompute)
    inputs, target = batch()
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), inputs, target)}
    pipe.step(inputs, target=target)
    assert seen
