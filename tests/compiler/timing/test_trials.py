"""Runs with made-up values: what they leave unchanged, which values they take, what a key of the cache tells apart."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.compiler import time_programs
from graphpp.compiler.timing import trials
from graphpp.runtime.program import Parameter, Phase, Program, Received, Saved, Sent
from tests.distributed import run_ranks

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
    assert counted[0] > counted[1] == 0
    assert torch.equal(*losses)


def test_equal_layers_with_random_numbers_are_timed_once(cache: Path, counted: list[int]) -> None:
    for layers in (4, 12):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(layers)))
        compiled(model).step(X)
    assert counted[0] > counted[1] == 0
    assert "0x" not in cache.read_text(), "an address would differ in the next process"


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.cond reads it
def test_branches_of_another_length_are_timed_anew(cache: Path, counted: list[int]) -> None:
    for length in (1, 1, 9):
        compiled(nn.Sequential(Branches(length), nn.Linear(8, 8))).step(X)
    first, again, longer = counted
    assert first > 0 and again == 0 and longer > 0


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


def cut_with_a_failure(rank: int, folder: str) -> tuple[list[tuple[str, ...]], int]:
    """The modules of each stage where rank 1 has no memory in a later round, and how many cells its cache then has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHPP_CACHE", f"{folder}/{rank}")
        once = trials.Trial.seconds

        def seconds(self: trials.Trial) -> float:
            if rank == 1 and self._runs == 3:
                raise MemoryError("no memory is left")
            return once(self)

        patch.setattr(trials.Trial, "seconds", seconds)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        pipe = graphpp.compile(model, mean, split="auto", schedule="1F1B", microbatches=2)
        pipe.step(X)
    return [stage.modules for stage in pipe.plan.stages], Path(folder, str(rank), "action_seconds.json").exists()


def test_a_rank_that_fails_in_a_later_round_lets_all_estimate(tmp_path: Path) -> None:
    first, second = run_ranks(cut_with_a_failure, 2, str(tmp_path))
    assert first == second and not first[1]


def test_programs_that_write_buffers_are_timed(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    before = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    compiled(model, example=graphpp.Microbatch((X,)))
    assert cache.exists() and "not timed" not in caplog.text
    assert all(torch.equal(buffer, before[fqn]) for fqn, buffer in model.named_buffers())


class Held:
    """A program of two results that notes whether the trial keeps its arguments."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        watched = [weakref.ref(each) for each in arguments]
        arguments.clear()
        self.alive.append(sum(each() is not None for each in watched))
        return (X.clone(),)


def warm(phase: Phase, inputs: Sequence[Parameter | Saved | Received], run: Callable[[list[Any]], Any]) -> trials.Trial:
    """A trial, which has run once, of a program that takes `inputs` and returns the layout of `X`."""
    graph = fx.Graph()
    for role in inputs:
        graph.placeholder(role.__class__.__name__).meta["val"] = X
    result = graph.call_function(torch.clone, tuple(graph.nodes)[:1])
    result.meta["val"] = X
    graph.output((result,))
    (trial,) = trials.warmed_up([(Program(0, phase, tuple(inputs), (Sent("value"),), run), graph)], torch.device("cpu"))
    return trial


def test_saved_and_received_values_die_in_the_program_as_in_a_step() -> None:
    held = Held()
    trial = warm(Phase.INPUT_GRAD, (Parameter("weight"), Saved("saved"), Received("arriving")), held)
    assert trial.seconds() > 0 and held.alive == [1, 1], "the parameter alone"


def test_other_memory_is_written_between_saved_values_and_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    copy, add = trials._copy, torch.Tensor.add_
    monkeypatch.setattr(trials, "_copy", lambda value: (order.append("copy"), copy(value))[1])
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, by: (order.append(f"{self.nbytes >> 20} MiB"), add(self, by))[1])

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        order.append("run")
        arguments.clear()
        return (X.clone(),)

    forward = warm(Phase.FORWARD, (Parameter("weight"), Received("arriving")), run)
    backward = warm(Phase.INPUT_GRAD, (Parameter("weight"), Saved("saved"), Received("arriving")), run)
    order.clear()
    forward.seconds()
    backward.seconds()
    assert order == ["copy", "run", "copy", "6 MiB", "copy", "run"]


def test_nothing_made_up_stays(cache: Path) -> None:
    import gc

    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(3)))
    gc.collect()
    gc.disable()
    try:
        compiled(model, example=graphpp.Microbatch((torch.ones(4, 96),)))
        left = [each for each in gc.get_objects() if type(each) is torch.Tensor and tuple(each.shape) == (96, 96)]
    finally:
        gc.enable()
    assert not [each for each in left if each.device.type == "cpu"]
