"""Saves in the machines' own folders: a training goes on with its bits although machines, and their folders, are lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.pipeline.checkpoint.send_files import Seat, Seats
from tests.distributed import WorkerDied, rank_outcomes, run_ranks

LAYERS = 8


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


Machine = Callable[[int], str]  # the folder of a rank's machine


def each_its_own(rank: int) -> str:
    return f"machine{rank}"


def two_on_each(rank: int) -> str:
    return f"machine{rank // 2}"


def one_for_all(rank: int) -> str:
    return "machine"


def training(ranks: int, replicas: int = 1, schedule: str = "1F1B") -> tuple[graphpp.Pipeline, torch.optim.AdamW]:
    torch.set_num_threads(1)
    stages = 2 * ranks if schedule != "1F1B" or ranks == 1 else ranks
    x, y = batch(0)
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp_replicate", "pp")) if replicas > 1 else None
    pipe = graphpp.compile(
        model(),
        F.mse_loss,
        example=graphpp.Microbatch((x[:2],), target=y[:2]),
        split=[str(at) for at in range(LAYERS // stages, LAYERS, LAYERS // stages)],
        schedule=schedule,
        microbatches=4,
        mesh=mesh,
        parallel=graphpp.Parallel(timeout=20.0),
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def train(
    rank: int, folder: Path, machine: Machine, ranks: int, until: int, mirror: bool | None = None, **layout: Any
) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """The losses of all steps, the step from which the training went on, and this rank's values; a save after each step."""
    pipe, optimizer = training(ranks, **layout)
    checkpoint = pipe.checkpoint(optimizer, extra={"losses": []})
    local = checkpoint.local(folder / machine(rank), mirror=mirror)
    began = pipe.steps if local.load(missing_ok=True) else 0
    while pipe.steps < until:
        x, y = batch(pipe.steps)
        checkpoint.extra["losses"].append(pipe.step(x, target=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        local.save()
    return checkpoint.extra["losses"], began, {key: value.clone() for key, value in pipe.state_dict().items()}


def undisturbed() -> list[float]:
    pipe, optimizer = training(1)
    losses = []
    for step in range(5):
        x, y = batch(step)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machine_of_two(tmp_path: Path, lost: int) -> None:
    run_ranks(train, 2, tmp_path, each_its_own, 2, 3)
    shutil.rmtree(tmp_path / f"machine{lost}")
    again = run_ranks(train, 2, tmp_path, each_its_own, 2, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_go_on(tmp_path: Path, ranks: int) -> None:
    run_ranks(train, 4, tmp_path, two_on_each, 4, 3)
    shutil.rmtree(tmp_path / "machine1")
    again = run_ranks(train, ranks, tmp_path, two_on_each, ranks, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


def test_more_ranks_on_new_machines_under_another_schedule(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, each_its_own, 2, 3)
    (tmp_path / "machine0").rename(tmp_path / "machine3")
    shutil.rmtree(tmp_path / "machine1")
    again = run_ranks(train, 4, tmp_path, each_its_own, 4, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


def on_a_v(rank: int, folder: Path) -> Any:
    return train(rank, folder, each_its_own, 2, 5, schedule="ZBVZeroBubble")


def test_another_schedule(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, each_its_own, 2, 3)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in run_ranks(on_a_v, 2, tmp_path))


def replicated(rank: int, folder: Path, until: int) -> Any:
    return train(rank, folder, each_its_own, 2, until, replicas=2)


@pytest.mark.parametrize("lost", [(2, 3), (0, 1), (1, 2), (3,)])
def test_a_replica_takes_the_values_of_its_twin(tmp_path: Path, lost: tuple[int, ...]) -> None:
    whole = run_ranks(replicated, 4, tmp_path / "whole", 5)
    run_ranks(replicated, 4, tmp_path / "lost", 3)
    for rank in lost:
        shutil.rmtree(tmp_path / "lost" / f"machine{rank}")
    again = run_ranks(replicated, 4, tmp_path / "lost", 5)
    for (losses, _, values), (losses_again, began, values_again) in zip(whole, again, strict=True):
        assert losses == losses_again and began == 3
        assert all(torch.equal(values[key], values_again[key]) for key in values)


def test_a_part_without_a_copy_starts_anew(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, each_its_own, 2, 3, False)
    shutil.rmtree(tmp_path / "machine1")
    assert [began for _, began, _ in run_ranks(train, 2, tmp_path, each_its_own, 2, 3, False)] == [0, 0]


def load(rank: int, folder: Path) -> None:
    pipe, optimizer = training(2)
    pipe.checkpoint(optimizer).local(folder / each_its_own(rank)).load()


def test_a_save_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete save in .*machine0"):
        run_ranks(load, 2, tmp_path)


def test_torn_metadata_is_named(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, each_its_own, 2, 1)
    metadata = next((tmp_path / "machine1").rglob(".metadata"))
    metadata.write_bytes(metadata.read_bytes()[:50])
    with pytest.raises(GraphPPError, match=f"{metadata} cannot be read"):
        run_ranks(load, 2, tmp_path)


def test_one_save_is_kept_and_nothing_else(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, one_for_all, 2, 3)
    assert [each.name.partition(".")[0] for each in (tmp_path / "machine").iterdir()] == ["000000000003"]


def in_the_background(rank: int, folder: Path) -> list[float]:
    pipe, optimizer = training(2)
    local = pipe.checkpoint(optimizer).local(folder / each_its_own(rank))
    losses = []
    for _ in range(2):
        pending = local.async_save()
        with pytest.raises(CheckpointError, match=r"the asynchronous save into .* is not over"):
            local.save()
        x, y = batch(0)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        pending.wait()
        assert pending.done()
        assert local.load()
    return losses


def test_a_save_in_the_background_has_the_state_of_its_call(tmp_path: Path) -> None:
    for first, again in run_ranks(in_the_background, 2, tmp_path):
        assert first == again


def test_one_process(tmp_path: Path) -> None:
    train(0, tmp_path, each_its_own, 1, 2)
    losses, began, _ = train(0, tmp_path, each_its_own, 1, 5)
    assert (losses, began) == (undisturbed(), 2)


# -------------------------------------------------------------------------------------------------- cut off


def killed(rank: int, folder: Path, victim: int, moment: int) -> Any:
    """A training in which a rank is killed after the first save, at a moment: a rename, or the removal of a folder."""
    passed, rename, rmtree = 0, Path.rename, shutil.rmtree

    def tick() -> None:
        nonlocal passed
        if rank == victim and passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    def renaming(path: Path, target: Path) -> Path:
        tick()
        found = rename(path, target)
        tick()
        return found

    def removing(path: Path) -> None:
        tick()
        rmtree(path)
        tick()

    train(rank, folder, each_its_own, 2, 1)
    with patch.object(Path, "rename", renaming), patch.object(shutil, "rmtree", removing):
        return train(rank, folder, each_its_own, 2, 4)


@pytest.mark.parametrize("moment", range(1, 13, 2))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_save_leaves_one(tmp_path: Path, victim: int, moment: int) -> None:
    outcomes = rank_outcomes(killed, 2, tmp_path, victim, moment)
    assert isinstance(outcomes[victim].error, WorkerDied)
    assert isinstance(outcomes[1 - victim].error, GraphPPError)
    again = run_ranks(train, 2, tmp_path, each_its_own, 2, 5)
    assert all(losses == undisturbed() and began > 0 for losses, began, _ in again)


def without_room(rank: int, folder: Path) -> str:
    pipe, optimizer = training(2)
    local = pipe.checkpoint(optimizer).local(folder / each_its_own(rank))
    local.save()
    x, y = batch(0)
    pipe.step(x, target=y)
    optimizer.step()
    full = OSError(28, "No space left on device")
    with patch("os.posix_fallocate", side_effect=full if rank == 1 else None), pytest.raises(GraphPPError) as caught:
        local.save()
    assert local.load()
    assert pipe.steps == 0
    return str(caught.value)


def test_a_folder_without_room_leaves_the_save_before(tmp_path: Path) -> None:
    assert all("No space left on device" in text for text in run_ranks(without_room, 2, tmp_path))


# -------------------------------------------------------------------------------------------------- who sends what


def seats(machines: dict[Seat, int]) -> Seats:
    found = Seats(None, None, Path("nowhere"))
    first = {machine: min(seat for seat in machines if machines[seat] == machine) for machine in machines.values()}
    vars(found)["machine_of"] = {seat: first[machine] for seat, machine in machines.items()}
    return found


def test_every_machine_gets_what_its_ranks_want_once() -> None:
    grid = seats({Seat(replica, rank): 10 * replica + rank // 2 for replica in range(2) for rank in range(4)})
    stored = {seat: {"f": 8} if seat.rank // 2 == seat.replica == 1 else {} for seat in grid.machine_of}
    across, within = grid.transfers({seat: ["f"] for seat in grid.machine_of}, stored)
    sent = [*across, *within]
    assert len({grid.machine_of[each.target] for each in sent}) == len(sent) == 3
    assert all(each.source.rank == each.target.rank for each in across)
    assert all(each.source.replica == each.target.replica for each in within)
