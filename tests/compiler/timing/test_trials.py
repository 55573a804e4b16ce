"""Runs with made-up values: what they leave unchanged, which values they take, what a key of the cache tells apart."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphpp
from graphpp.compiler import time_programs

AUTOCAST: list[bool] = []
X = torch.ones(4, 8)


@torch.library.custom_op("trials::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` and a number of the user's generators; notes whether autocast is on."""
    AUTOCAST.append(torch.is_autocast_enabled("cpu"))
    return x + torch.rand(()) + random.random()


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, grad: grad)


class Noisy(nn.Module):
    """A linear layer, and noise of an operator that does not say that it is random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noise(self.linear(x))


class Branches(nn.Module):
    """A linear layer before one of two branches, of which the first has `length` operations."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear, self.length = nn.Linear(8, 8), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def long(y: torch.Tensor) -> torch.Tensor:
            for _ in range(self.length):
                y = y.sin()
            return y

        return torch.cond(x.sum() > 0, long, torch.cos, (self.linear(x),))


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def compiled(model: nn.Module, **more: Any) -> graphpp.Pipeline:
    return graphpp.compile(model, mean, split="auto", schedule=["0F0 1F0 1B0 0B0"], microbatches=1, **more)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path))
    return tmp_path / "action_seconds.json"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of programs that each cut measures."""
    found: list[int] = []
    measured = time_programs.Stopwatch._measured

    def counting(self: time_programs.Stopwatch, items: Sequence[Any]) -> list[float] | None:
        found.append(len(items))
        return measured(self, items)

    monkeypatch.setattr(time_programs.Stopwatch, "_measured", counting)
    return found


def test_random_states_and_modes_are_those_of_a_step(cache: Path, counted: list[int]) -> None:
    losses = []
    compiled(nn.Sequential(*(Noisy() for _ in range(3)))).step(X)  # what is loaded once may draw random numbers
    cache.unlink()
    counted.clear()
    for _ in range(2):  # the second pipeline finds all seconds in the cache
        torch.manual_seed(0)
        random.seed(0)
        AUTOCAST.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(compiled(nn.Sequential(*(Noisy() for _ in range(3)))).step(X).loss)
        assert set(AUTOCAST) == {False}
    assert len(counted) == 1 and counted[0] > 0
    assert torch.equal(*losses)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.cond reads it
def test_branches_of_another_length_are_timed_anew(cache: Path, counted: list[int]) -> None:
    for length in (1, 1, 9):
        compiled(nn.Sequential(Branches(length), nn.Linear(8, 8))).step(X)
    first, longer = counted  # the second pipeline times nothing
    assert first > 0 and longer > 0


def test_a_cell_that_is_no_seconds_is_measured_anew(cache: Path, counted: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    compiled(model).step(X)
    table = json.loads(cache.read_text())
    for wrong in ("some", "-1.0", "nan"):
        cache.write_text(json.dumps(dict.fromkeys(table, wrong)))
        compiled(model).step(X)
    assert counted == [len(table)] * 4
    assert all(float(seconds) > 0 for seconds in json.loads(cache.read_text()).values())


def test_made_up_values_are_probabilities(caplog: pytest.LogCaptureFixture) -> None:
    model, target = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()), torch.rand(4, 8)
    graphpp.verify(
        model, F.binary_cross_entropy, graphpp.Microbatch((X,), target=target), split="auto", ranks=2, schedule="1F1B"
    ).raise_if_wrong()
    assert "not timed" not in caplog.text


def test_programs_that_write_buffers_are_timed(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    before = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    compiled(model, example=graphpp.Microbatch((X,)))
    assert cache.exists() and "not timed" not in caplog.text
    assert all(torch.equal(buffer, before[fqn]) for fqn, buffer in model.named_buffers())
