"""Steps that are replayed as CUDA graphs, by a pool for the CPU that spoils freed memory (`tests/cuda_graph_pool.py`).

Contract: each training keeps its losses, gradients and outputs, and compares them after its last step with those of a training
without graphs, bit for bit. Without one of the copies that graphpp makes, such a comparison fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp.backends import cuda_graphs
from graphpp.runtime.gradients.accumulate import Accumulator
from graphpp.runtime.task import Task
from tests import internals
from tests.cuda_graph_pool import Pool
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.movers import CopyingMover, moving_by
from tests.runtime.test_offloader import ALL
from tests.training import capturing_once

STEPS, WIDTH = 7, 16  # rows of 64 bytes: a BLAS may round otherwise where memory is aligned otherwise


class Residual(nn.Module):
    """Writes buffers, and reads a value from below that a relay or a stage on the same rank hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x) + first
        return x


def trained(
    options: Mapping[str, Any], *, accumulate: int = 1, to_none: bool = True, rows: Sequence[int] = (8,), evals: bool = False
) -> list[Tensor]:
    """All that the steps gave, kept until the last one; `accumulate` steps for one of the optimizer."""
    torch.manual_seed(0)
    pipe = graphpp.compile(Residual(), nn.functional.mse_loss, microbatches=4, **options)
    kept: list[Tensor] = []
    for number in range(STEPS):
        x = torch.randn(rows[number % len(rows)], WIDTH)
        kept.append(pipe.step(x, target=x.flip(0)).losses)
        if evals:
            result = pipe.eval(x, target=x, output="each")
            kept += [result.loss, *result.output]
        if (number + 1) % accumulate == 0:
            grads = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
            kept += grads if to_none else [grad.clone() for grad in grads]
            for parameter, grad in zip(pipe.parameters(), grads, strict=True):
                parameter.data.sub_(grad, alpha=0.1)
            pipe.zero_grad(set_to_none=to_none)
    return [*kept, *(buffer.clone() for _, buffer in pipe.named_buffers())]


def both(
    rank: int, options: Mapping[str, Any], given: Mapping[str, Any], whole: bool = True, mover: Any = None
) -> tuple[bool, Pool]:
    """Whether a training has the same bits with graphs as without, and the pool of the graphs."""
    pool = Pool()
    moving = nullcontext() if mover is None else moving_by(mover)
    with capturing_once(), moving:
        expected = trained(options, **given)
        backend = options.get("backend", graphpp.Eager())
        with internals.recording_by(pool), nullcontext() if whole else internals.recording_tasks():
            found = trained({**options, "backend": type(backend)(cudagraphs=True)}, **given)
    same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return same, pool


SPLIT = {2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}
GPIPE = {"schedule": "GPipe", "split": SPLIT[2]}
TRAININGS: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
    (GPIPE, {}),
    ({"schedule": "Interleaved1F1B", "split": SPLIT[4]}, {"accumulate": 2, "evals": True}),
    ({"schedule": "ZBVZeroBubble", "split": SPLIT[2]}, {"to_none": False}),
    ({"schedule": "1F1B", "split": SPLIT[2], "memory": graphpp.Memory(recompute="full")}, {"rows": (8, 8, 8, 12)}),
    *further(
        ({"schedule": "1F1B", "split": SPLIT[2]}, {"accumulate": 2, "to_none": False, "rows": (8, 12)}),
        ({"schedule": "LoopedBFS", "split": SPLIT[4], "gradients": graphpp.Gradients(fused=True)}, {"evals": True}),
        ({"schedule": "GPipe", "split": SPLIT[2], "gradients": graphpp.Gradients(dtype=torch.float64)}, {"accumulate": 2}),
    ),
]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("options", "given"), TRAININGS)
def test_a_training(options: Mapping[str, Any], given: Mapping[str, Any], whole: bool) -> None:
    same, pool = both(0, options, given, whole)
    assert same
    assert pool.replays > pool.recordings > 0
    assert (pool.recordings < 8) == whole
    assert pool.held == 0


def test_what_is_offloaded_is_copied_before_it_is_overwritten() -> None:
    mover = CopyingMover()
    same, pool = both(0, {**GPIPE, "memory": graphpp.Memory(offload=ALL)}, {"evals": True}, mover=mover)
    assert same
    assert mover.moved > 0
    assert pool.replays > pool.recordings > 8  # the tasks, since their values leave the device between them


@pytest.mark.parametrize("schedule", ["1F1B", *further("GPipe")])
def test_two_ranks(schedule: str) -> None:
    options = {"schedule": schedule, "split": SPLIT[2]}
    for same, pool in run_ranks(on_a_rank, 2, options, {"accumulate": 2, "evals": True}):
        assert same
        assert pool > 8


def on_a_rank(rank: int, options: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[bool, int]:
    same, pool = both(rank, options, given)
    return same, pool.replays


def test_a_profile_and_a_failure_between_steps() -> None:
    pool = Pool()
    with capturing_once(), internals.recording_by(pool):
        torch.manual_seed(0)
        backend = graphpp.Eager(cudagraphs=True)
        pipe = graphpp.compile(Residual(), nn.functional.mse_loss, microbatches=4, backend=backend, **GPIPE)
        x, arguments = torch.randn(8, WIDTH), Task.arguments

        def gradients() -> list[Tensor]:
            pipe.zero_grad()
            pipe.step(x, target=x)
            return [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]

        def failing(task: Task) -> list[Any]:
            if task.key.phase == "B" and task.key.microbatch == 2:
                raise RuntimeError("out of luck")
            return arguments(task)

        expected = gradients()
        for disturb in (lambda: pipe.profile(x, target=x, repeat=2), lambda: None, lambda: pipe.profile(x, target=x)):
            disturb()
            assert all(map(torch.equal, gradients(), expected))
        with internals.recording_tasks():
            gradients()
            with patch.object(Task, "arguments", failing), pytest.raises(RuntimeError, match="out of luck"):
                gradients()
            assert all(map(torch.equal, gradients(), expected))
    assert pool.replays > pool.recordings > 1


@pytest.fixture(params=["gradients", "arguments", "values that are read too late"])
def lacking(request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the things that keep values in the graphs' memory right is lacking."""
    init = Accumulator.__init__

    def keeping(self: Any, fqns: Any, shared: Any = (), kernel: Any = None, is_overwritten: Any = None) -> None:
        init(self, fqns, shared, kernel)

    broken = {
        "gradients": patch.object(Accumulator, "__init__", keeping),
        "arguments": patch.object(cuda_graphs, "copy_elements", lambda buffers, values: None),
        "values that are read too late": patch.object(Task, "_add_saved", saved_of_another),
    }
    with broken[request.param]:
        yield request.param


def saved_of_another(task: Task, arguments: list[Any]) -> None:
    """Gives a backward what the forward saved, and keeps it for the next step, whose backward of that microbatch reads it."""
    kept = vars(task._buffers).setdefault("kept", {})
    saved = task._buffers.saved.pop(task._microbatch)
    for index, name in task._wiring.saved:
        arguments[index] = kept.get((task._microbatch, name), saved[name])
    kept.update({(task._microbatch, name): value for name, value in saved.items()})


def test_numbers_are_wrong_where_one_is_lacking(lacking: str) -> None:
    options = {"schedule": "1F1B", "split": SPLIT[2]}
    same, _ = both(0, options, {"accumulate": 2, "evals": True}, whole=False)
    assert not same
