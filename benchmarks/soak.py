"""Check that a long training takes no more memory, threads, files or tensors as it runs, and has the bits of a resumed one.

    torchrun --nproc-per-node 2 benchmarks/soak.py [--steps 10000]
    torchrun --nproc-per-node 4 benchmarks/soak.py --steps 2000 --mesh dp_shard=2

A small model with dropout, 1F1B over the ranks, an optimizer, new data in every step, batches of three sizes in turn, and an
evaluation of each size in every ten steps. Without --mesh the model has buffers too. Every `--every` steps each rank notes its
resident memory, its threads, its open files and the tensors made since it was compiled, and all ranks save a checkpoint over
the one before. The first tenth of the notes, and `WARM_UP` steps at least, are the warm-up; a later note may exceed its maximum
by no more than `BOUNDS`. At the end a pipeline that is compiled anew loads the last checkpoint but one, makes the steps since,
and must hold the same bits. The exit status is 1 where a figure grew or a bit differs.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import RANK, RANKS, over_ranks, start
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphpp
from graphpp.runtime.dtensors import local_tensor

WIDTH, MICROBATCHES = 32, 4
ROWS = (8, 6, 10)  # of a microbatch, in turn
PATIENCE = 10.0  # seconds in which what is let go of is gone, also on a busy machine
WARM_UP = 50  # steps; on a busy machine it took 20 until all tensors were there that the process keeps for good


@dataclass(frozen=True)
class Note:
    """The state of one process: resident MiB, threads of the system and of Python, open files, tensors not frozen by `gc`."""

    mib: float
    threads: int
    python_threads: int
    files: int
    tensors: int

    @classmethod
    def now(cls) -> Note:
        """The state of this process."""
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
        files = len(os.listdir("/proc/self/fd"))
        return cls(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), threading.active_count(), files, tensors)

    @classmethod
    def at_rest(cls, before: Sequence[Note], warm_up: int) -> Note:
        """The least of each figure over five looks, 10 ms apart, or more of them where they tell of growth since `before`.

        gloo frees the tensors of a finished message a moment late; on a busy machine this moment may last.
        """
        found, until = cls.now(), time.monotonic() + PATIENCE
        looks = 1
        warm = len(before) >= warm_up
        while looks < 5 or (warm and grown([*before, found], warm_up) and time.monotonic() < until):
            time.sleep(0.01)
            found = found.least(cls.now())
            looks += 1
        return found

    def least(self, other: Note) -> Note:
        """The lesser of each figure."""
        return Note(*map(min, astuple(self), astuple(other)))


BOUNDS = Note(mib=8, threads=0, python_threads=0, files=0, tensors=0)
"""The growth allowed after the warm-up. Memory: the allocator's own slack comes and goes."""


def main() -> None:
    option = options()
    device = start()
    mesh = mesh_of(option.mesh, device)
    names = [tempfile.mkdtemp(prefix="soak-") if RANK == 0 else ""]
    if RANKS > 1:
        dist.broadcast_object_list(names)
    try:
        faults = faults_of(Path(names[0]), option, device, mesh)
    finally:
        if RANK == 0:
            shutil.rmtree(names[0])
    if RANKS > 1:
        dist.destroy_process_group()
    sys.exit(bool(faults))


def faults_of(folder: Path, option: argparse.Namespace, device: torch.device, mesh: DeviceMesh | None) -> list[str]:
    """Train, resume the last save but one, and print the notes; the figures that grew and the tensors that differ."""
    training = Training(device, mesh)
    gc.collect()
    gc.freeze()  # modules, and the pipeline as compiled: no look walks over them, or counts its tensors
    warm_up = min(-(-WARM_UP // option.every), option.steps // option.every // 2)
    notes = soak(training, option.steps, option.every, folder, warm_up)
    everyone = [[Note(*row) for row in rows] for rows in gathered(notes)]
    faults = [f"rank {rank}: {fault}" for rank, own in enumerate(everyone) for fault in grown(own, warm_up)]
    fresh = Training(device, mesh, seed=1)
    fresh.load(folder / "before")
    fresh.run(option.every)
    unequal = over_ranks([float(len(training.differences(fresh)))])
    faults += [f"rank {rank}: {count:g} tensors differ from the fresh run's" for rank, (count,) in enumerate(unequal) if count]
    if RANK == 0:
        Console(width=120).print(table(everyone, option.every), "\n".join(faults) or "nothing grew, and no bit differs")
    return faults


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--every", type=int, default=250, help="steps between two notes")
    parser.add_argument("--mesh", help="another dimension of the mesh than pp, and its ranks: dp_shard=2")
    found = parser.parse_args()
    if found.steps < 2 * found.every or found.steps % found.every:
        parser.error(f"--steps {found.steps}: take a multiple of --every, {found.every}, and twice as many at least")
    return found


def mesh_of(option: str | None, device: torch.device) -> DeviceMesh | None:
    """The mesh of `--mesh`."""
    if option is None:
        return None
    name, _, count = option.partition("=")
    return init_device_mesh(device.type, (RANKS // int(count), int(count)), mesh_dim_names=("pp", name))


class Training:
    """A pipeline with its optimizer; batches are those of its step and of the rank's replica."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, seed: int = 0) -> None:
        """`seed`: of the parameters' values."""
        torch.manual_seed(seed)
        ranks = RANKS if mesh is None else mesh["pp"].size()
        self._replica = 0 if mesh is None else mesh.get_local_rank(1)
        self._device, norm = device, nn.BatchNorm1d if mesh is None else nn.LayerNorm
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Dropout(0.1)) for _ in range(2 * ranks)]
        one = torch.zeros(ROWS[0], WIDTH, device=device)
        self.pipe = graphpp.compile(
            nn.Sequential(*blocks),
            nn.functional.mse_loss,
            example=graphpp.Microbatch((one,), target=one),
            split=ranks,
            schedule="1F1B",
            microbatches=MICROBATCHES,
            mesh=mesh,
            parallel=graphpp.Parallel(device=device if mesh is None else None),
        )
        self._optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.01, momentum=0.9)
        self._done = 0

    def run(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            self._done += 1
            generator = torch.Generator().manual_seed(2 * self._done + self._replica)
            rows = MICROBATCHES * ROWS[self._done % len(ROWS)]
            x, y = (torch.randn(rows, WIDTH, generator=generator).to(self._device) for _ in range(2))
            self.pipe.step(x, target=y)
            self.pipe.clip_grad_norm_(1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if 0 < self._done % 10 <= len(ROWS):
                self.pipe.eval(x, target=y)

    def save(self, folder: Path) -> None:
        """Save a checkpoint."""
        self.pipe.checkpoint(self._optimizer).save(folder)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self.pipe.checkpoint(self._optimizer).load(folder)
        self._done = self.pipe.steps

    def differences(self, other: Training) -> list[str]:
        """The FQNs of parameters and buffers of this rank that have other bits in another training."""
        mine, theirs = (dict([*each.pipe.named_parameters(), *each.pipe.named_buffers()]) for each in (self, other))
        return [fqn for fqn in mine if not torch.equal(local_tensor(mine[fqn]), local_tensor(theirs[fqn]))]


def soak(training: Training, steps: int, every: int, folder: Path, warm_up: int) -> list[Note]:
    """Train, and after every `every` steps save, the last time but one as "before", and note the state of this process."""
    notes: list[Note] = []
    for at in range(steps // every):
        training.run(every)
        training.save(folder / ("before" if at == steps // every - 2 else "latest"))
        notes.append(Note.at_rest(notes, warm_up))
    return notes


def grown(notes: Sequence[Note], warm_up: int = 1) -> list[str]:
    """The figures that exceed those of the warm-up, of so many notes at least, by more than `BOUNDS`.

    Raises ValueError where no note is later than the warm-up.
    """
    if len(notes) <= warm_up:
        raise ValueError(f"{len(notes)} notes tell nothing about growth: take more steps, or note more often")
    first = max(warm_up, len(notes) // 10)
    faults = []
    for name, allowed in asdict(BOUNDS).items():
        values = [getattr(note, name) for note in notes]
        before, after = max(values[:first]), max(values[first:])
        if after - before > allowed:
            faults.append(f"{name} grew from {before:g} to {after:g}; {allowed:g} more are allowed")
    return faults


def gathered(notes: Sequence[Note]) -> list[list[list[float]]]:
    """The notes of all ranks, by rank."""
    fields = len(asdict(BOUNDS))
    rows = over_ranks([value for note in notes for value in asdict(note).values()])
    return [[row[at : at + fields] for at in range(0, len(row), fields)] for row in rows]


def table(everyone: Sequence[Sequence[Note]], every: int) -> Table:
    """About twenty of the notes, the ranks next to each other."""
    shown = Table(title=f"{RANKS} ranks: the state of each", title_justify="left")
    shown.add_column("step", justify="right")
    for name in asdict(BOUNDS):
        shown.add_column(name, justify="right")
    count = len(everyone[0])
    for at in sorted({*range(0, count, max(1, count // 20)), count - 1}):
        columns = zip(*(asdict(notes[at]).values() for notes in everyone), strict=True)
        shown.add_row(str((at + 1) * every), *(" ".join(f"{value:.4g}" for value in each) for each in columns))
    return shown


if __name__ == "__main__":
    main()
