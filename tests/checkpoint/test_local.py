"""Saves in the machines' own folders: a training goes on with its bits although machines, and their folders, are lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.checkpoint.machines import Machines, MeshRank
from graphpp.errors import CheckpointError, GraphPPError
from tests.distributed import WorkerDied, rank_outcomes, run_ranks
from tests.exhaustive import further
from tests.saved_graphs import GRAPHS

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


def training(
    ranks: int, replicas: int = 1, schedule: str = "1F1B", mesh: Any = None
) -> tuple[graphpp.Pipeline, torch.optim.AdamW]:
    torch.set_num_threads(1)
    stages = 2 * ranks if schedule != "1F1B" or ranks == 1 else ranks
    x, y = batch(0)
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp_replicate", "pp"))
    pipe = graphpp.compile(
        model(),
        F.mse_loss,
        example=graphpp.Microbatch((x[:2],), target=y[:2]),
        split=[str(at) for at in range(LAYERS // stages, LAYERS, LAYERS // stages)],
        schedule=schedule,
        microbatches=4,
        mesh=mesh,
        artifact=GRAPHS,
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


@cache
def undisturbed() -> list[float]:
    """The losses of one process."""
    pipe, optimizer = training(1)
    losses = []
    for step in range(5):
        x, y = batch(step)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of two machines after three steps."""
    folder = tmp_path_factory.mktemp("three")
    run_ranks(train, 2, folder, each_its_own, 2, 3)
    return folder


@pytest.fixture
def saved(three_steps: Path, tmp_path: Path) -> None:
    """The folders of two machines after three steps are in `tmp_path`."""
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("lost", [1, *further(0)])
def test_a_lost_machine_of_two(tmp_path: Path, lost: int) -> None:
    shutil.rmtree(tmp_path / f"machine{lost}")
    again = run_ranks(train, 2, tmp_path, each_its_own, 2, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_fewer_ranks_go_on(tmp_path: Path, ranks: int) -> None:
    run_ranks(train, 4, tmp_path, two_on_each, 4, 3)
    shutil.rmtree(tmp_path / "machine1")
    again = run_ranks(train, ranks, tmp_path, two_on_each, ranks, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


@pytest.mark.usefixtures("saved")
def test_more_ranks_on_new_machines_under_another_schedule(tmp_path: Path) -> None:
    (tmp_path / "machine0").rename(tmp_path / "machine3")
    shutil.rmtree(tmp_path / "machine1")
    again = run_ranks(train, 4, tmp_path, each_its_own, 4, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


def replicated(rank: int, folder: Path, until: int) -> Any:
    return train(rank, folder, each_its_own, 2, until, replicas=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lost",), [((2, 3),), *further(((1, 2),), ((0, 1),), ((3,),))])
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

    def removing(path: Path, **options: Any) -> None:
        tick()
        rmtree(path, **options)
        tick()

    train(rank, folder, each_its_own, 2, 1)
    with patch.object(Path, "rename", renaming), patch.object(shutil, "rmtree", removing):
        return train(rank, folder, each_its_own, 2, 4)


MOMENTS = [(1, 7)]
OTHER_MOMENTS = [(victim, moment) for moment in range(1, 12, 2) for victim in (0, 1) if (victim, moment) not in MOMENTS]


@pytest.mark.parametrize(("victim", "moment"), [*MOMENTS, *further(*OTHER_MOMENTS)])
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


def damage(folder: Path, machine: str, harm: str) -> None:
    """Damage the largest file of a machine's save, or the metadata."""
    files = [file for file in (folder / machine).rglob("*") if file.is_file()]
    if harm == "metadata":
        victim = next(file for file in files if file.name == ".metadata")
        victim.write_bytes(victim.read_bytes()[:50])
        return
    victim = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(victim.read_bytes())
    if harm == "a bit":
        content[content.index(b"data/0") + 80] ^= 4
    victim.write_bytes(content[: len(content) // 2] if harm == "half" else content[:0] if harm == "empty" else content)


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("harm", ["half", *further("empty", "metadata")])
def test_a_torn_file_is_taken_from_the_other_machine(tmp_path: Path, harm: str) -> None:
    damage(tmp_path, "machine0", harm)
    again = run_ranks(train, 2, tmp_path, each_its_own, 2, 5)
    assert all(losses == undisturbed() and began == 3 for losses, began, _ in again)


def test_a_flipped_bit_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    train(0, tmp_path, each_its_own, 1, 2)
    damage(tmp_path, "machine0", "a bit")
    with pytest.raises(CheckpointError, match=r"__0_\w+_0\.distcp is damaged: the checksum of its record"):
        train(0, tmp_path, each_its_own, 1, 3)


def test_what_others_have_in_the_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / "machine0"
    pipe, optimizer = training(1)
    checkpoint = pipe.checkpoint(optimizer)
    checkpoint.save(folder / "latest" / "step2")
    (folder / "notes").mkdir()
    (folder / "link").symlink_to(tmp_path)
    assert not checkpoint.local(folder).load(missing_ok=True)
    checkpoint.local(folder).save()
    assert (folder / "latest" / "step2" / ".metadata").exists() and (folder / "notes").exists() and (folder / "link").exists()


def test_saves_of_another_training_are_neither_removed_nor_mixed(tmp_path: Path) -> None:
    (pipe, optimizer), (other, another) = training(1), training(1)
    pipe.checkpoint(optimizer).local(tmp_path).save()
    with pytest.raises(CheckpointError, match="has saves that this run has not loaded"):
        other.checkpoint(another).local(tmp_path).save()
    looked = other.checkpoint(another).local(tmp_path / "own")
    assert not looked.load(missing_ok=True)
    pipe.checkpoint(optimizer).local(tmp_path / "own").save()
    with pytest.raises(CheckpointError, match="has saves that this run has not loaded"):
        looked.save()
    assert pipe.checkpoint(optimizer).local(tmp_path / "own").load()
    other.checkpoint(another).local(tmp_path / "third").save()
    shutil.copytree(tmp_path / "third", tmp_path, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="saves of 2 trainings"):
        pipe.checkpoint(optimizer).local(tmp_path).load()


def test_the_later_of_two_saves_at_one_step_is_loaded(tmp_path: Path) -> None:
    pipe, optimizer = training(1)
    checkpoint = pipe.checkpoint(optimizer, extra={"n": 0})
    local = checkpoint.local(tmp_path)
    for number in range(12):
        checkpoint.extra["n"] = number
        shutil.copytree(tmp_path, tmp_path.with_name("kept"), dirs_exist_ok=True)
        local.save()
    shutil.copytree(tmp_path.with_name("kept"), tmp_path, dirs_exist_ok=True)
    assert local.load()
    assert checkpoint.extra["n"] == 11
    assert len(list(tmp_path.iterdir())) == 1


def replicas_in_mesh(rank: int, folder: Path, shape: tuple[tuple[str, int], ...], machine: Machine, until: int) -> Any:
    names, sizes = zip(*shape, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return train(rank, folder, machine, dict(shape)["pp"], until, mesh=mesh)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "machine", "ranks", "lost"),
    [
        ((("dp_replicate", 3), ("pp", 1)), each_its_own, 3, ["machine0", "machine1"]),
        *further(
            ((("dp_replicate", 1), ("pp", 2)), each_its_own, 2, ["machine1"]),
            ((("pp", 2), ("dp_replicate", 2)), two_on_each, 4, ["machine1"]),
            ((("pp", 2), ("dp_replicate", 2)), two_on_each, 4, ["machine0"]),
            ((("dp_replicate", 3), ("pp", 1)), each_its_own, 3, ["machine0", "machine2"]),
        ),
    ],
)
def test_any_layout_of_replicas_survives_a_lost_machine(
    tmp_path: Path, shape: tuple[tuple[str, int], ...], machine: Machine, ranks: int, lost: list[str]
) -> None:
    run_ranks(replicas_in_mesh, ranks, tmp_path, shape, machine, 2)
    for name in lost:
        shutil.rmtree(tmp_path / name)
    again = run_ranks(replicas_in_mesh, ranks, tmp_path, shape, machine, 3)
    assert all(began == 2 and len(losses) == 3 for losses, began, _ in again)


def other_calls(rank: int, folder: Path) -> str:
    pipe, optimizer = training(2)
    checkpoint = pipe.checkpoint(optimizer)
    local = checkpoint.local(folder / each_its_own(rank))
    with pytest.raises(GraphPPError) as caught:
        local.save() if rank else checkpoint.save(folder / "disk")
    local.save()
    return str(caught.value)


def test_ranks_that_make_other_calls_are_told_at_once(tmp_path: Path) -> None:
    assert all("differs in the call" in text for text in run_ranks(other_calls, 2, tmp_path))


def machines_of(ranks: dict[MeshRank, int]) -> Machines:
    found = Machines(MeshRank(0, 0), None, Path("nowhere"))
    first = {machine: min(rank for rank in ranks if ranks[rank] == machine) for machine in ranks.values()}
    vars(found)["of"] = {rank: first[machine] for rank, machine in sorted(ranks.items())}
    return found


@pytest.mark.parametrize("seed", range(200))
def test_a_rank_sends_only_what_its_machine_has(seed: int) -> None:
    draw = random.Random(seed)
    replicas, ranks, count = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 6)
    machines = machines_of({MeshRank(a, b): draw.randrange(count) for a in range(replicas) for b in range(ranks)})
    there = {machine: {f: 1 + f_at for f_at, f in enumerate("abc") if draw.random() < 0.4} for machine in machines.of.values()}
    there[draw.choice(list(there))].update(a=1, b=2, c=3)
    stored = {rank: there[machine] for rank, machine in machines.of.items()}
    wanted = {rank: draw.sample("abc", draw.randint(0, 3)) for rank in machines.of}
    has = {machine: set(files) for machine, files in there.items()}
    for each in machines.transfers(wanted, stored):
        source, target = there[machines.of[each.source]], has[machines.of[each.target]]
        near = [rank for rank in machines.of if rank.replica == each.target.replica and each.file in there[machines.of[rank]]]
        assert source[each.file] == each.bytes and (each.source in near or not near)
        assert each.file not in target
        target.add(each.file)
    assert all(file in has[machines.of[rank]] for rank, files in wanted.items() for file in files)


def test_a_file_of_no_machine_is_named() -> None:
    machines = machines_of({MeshRank(0, 0): 0})
    with pytest.raises(CheckpointError, match="f is on no machine"):
        machines.transfers({MeshRank(0, 0): ["f"]}, {MeshRank(0, 0): {}})
