"""A training that is saved and loaded in another layout goes on with the bits of a training that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.errors import CheckpointError
from tests.checkpoint.resumes import (
    FOUR,
    ON_A_V,
    ONE,
    SPLIT,
    STEPS,
    TWO,
    Layout,
    Optimizers,
    Tied,
    adafactor,
    adamw,
    batch,
    check_resumes,
    fused,
    momentum,
    muon_and_adam,
    pipeline,
    sgd,
)
from tests.distributed import run_ranks
from tests.exhaustive import further


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FOUR, TWO),
        *further((ONE, FOUR), (TWO, ONE), (FOUR, ONE), (TWO, ON_A_V), (ON_A_V, SPLIT), (SPLIT, FOUR)),
        *further((ONE, ON_A_V), (FOUR, FOUR), (SPLIT, TWO)),
    ],
)
def test_any_layout_resumes_any_other(first: Layout, second: Layout, tmp_path: Path) -> None:
    check_resumes(first, second, adamw, tmp_path)


@pytest.mark.parametrize("make", [fused, muon_and_adam, *further(sgd, momentum, adafactor)])
def test_optimizers_resume(make: Optimizers, tmp_path: Path) -> None:
    check_resumes(TWO, ONE, make, tmp_path)


def saves_in_the_background(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    pipe = pipeline(TWO, 3)
    optimizer = adamw(pipe.parameters())[0]
    checkpoint = pipe.checkpoint(optimizer)
    pending = checkpoint.async_save(folder)
    losses = []
    for number in range(2):  # goes on while the first state is written
        x, y = batch(number)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
    pending.wait()
    assert pending.done()
    checkpoint.load(folder)
    optimizer.zero_grad()
    again = []
    for number in range(2):
        x, y = batch(number)
        again.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
    return losses, again


def test_an_async_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    for losses, again in run_ranks(saves_in_the_background, 2, tmp_path / "saved"):
        assert losses == again


def replicas_save(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    pipe = pipeline(SPLIT, 3, mesh)
    optimizer = momentum(pipe.parameters())[0]
    checkpoint = pipe.checkpoint(optimizer)

    def steps() -> list[float]:
        losses = []
        for number in range(2):
            x, y = batch(10 * mesh.get_local_rank("dp_replicate") + number)
            losses.append(pipe.step(x, target=y).loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    steps()
    checkpoint.save(folder)
    assert (folder / ".metadata").is_file()  # on the replica that does not write as well
    dist.barrier()
    state = torch.get_rng_state()
    first = steps()
    checkpoint.load(folder)
    torch.set_rng_state(state)
    return first, steps()


def test_replicas_load_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    for first, again in run_ranks(replicas_save, 4, tmp_path / "saved"):
        assert first == again


def by_torch(rank: int, layout: Layout, make: Optimizers, folder: Path, first: int) -> list[float]:
    """Losses of a training that torch's own calls save and load (into optimizers without state) after `first` steps."""
    import torch.distributed.checkpoint as dcp

    losses: list[float] = []
    for number in range(2):
        pipe = pipeline(layout, 3 + number)
        optimizers = make(pipe.parameters())
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
        state = {"app": pipe.checkpoint(*optimizers, *schedulers, extra={"epoch": number})}
        if number:
            dcp.load(state, checkpoint_id=folder)
            assert state["app"].extra == {"epoch": 0}
        while pipe.steps < (2 * STEPS if number else first):
            x, y = batch(pipe.steps)
            losses.append(pipe.step(x, target=y).loss.item())
            for each in (*optimizers, *schedulers):
                each.step()
            pipe.zero_grad()
        if not number:
            dcp.save(state, checkpoint_id=folder)
            assert first or not any(each.state for each in optimizers)
    return losses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("layout", "make"),
    [(TWO, adamw), (ONE, momentum), *further(*((ONE, make) for make in (fused, muon_and_adam, sgd, adafactor)), (TWO, fused))],
)
def test_torchs_own_calls_take_the_checkpoint(layout: Layout, make: Optimizers, tmp_path: Path) -> None:
    expected = by_torch(0, ONE, make, tmp_path / "all", 2 * STEPS)
    for first in (0, STEPS):
        given = layout, make, tmp_path / f"{first}", first
        found = run_ranks(by_torch, layout.ranks, *given) if layout.ranks > 1 else [by_torch(0, *given)]
        assert all(losses[-STEPS:] == expected[STEPS:] for losses in found)


def test_an_object_without_a_state_is_refused() -> None:
    pipe = pipeline(ONE, 3)
    with pytest.raises(CheckpointError, match=r"argument 0 of pipe\.checkpoint is 3: give optimizers"):
        pipe.checkpoint(3)  # type: ignore[arg-type]


def test_a_pipeline_without_a_graph_cannot_say_which_parameters_are_its_own() -> None:
    pipe = graphpp.compile(Tied(), F.cross_entropy, split=2)
    with pytest.raises(graphpp.GraphPPError, match="nothing is captured yet"):
        pipe.checkpoint()
