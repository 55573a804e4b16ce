"""Check that a pipeline that runs for long does not grow in memory, threads, files or tensors.

    torchrun --nproc-per-node 2 benchmarks/soak.py [--steps 10000]

A small model with dropout and a buffer, 1F1B over the ranks, an optimizer, new data in every step, and an evaluation in every
tenth step. Every `--every` steps each rank notes its resident memory, its threads, its open files and the tensors alive.
The maximum of the first tenth of the notes counts as warm-up; a later note may exceed it by no more than `BOUNDS`. The exit
status is 1 where one does.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
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

import graphpp

WIDTH, ROWS, MICROBATCHES = 32, 8, 4
PATIENCE = 2.0  # seconds in which what is let go of is gone


@dataclass(frozen=True)
class Note:
    """The state of one process: resident MiB, threads of the system and of Python, open files, tensors alive."""

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
    def at_rest(cls, before: Sequence[Note]) -> Note:
        """The least of each figure over five looks, 10 ms apart, or more of them where they tell of growth since `before`.

        gloo frees the tensors of a finished message a moment late; on a busy machine this moment may last.
        """
        found, until = cls.now(), time.monotonic() + PATIENCE
        looks = 1
        while looks < 5 or (before and grown([*before, found]) and time.monotonic() < until):
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
    notes = soak(option.steps, option.every, device)
    everyone = [[Note(*row) for row in rows] for rows in gathered(notes)]
    faults = [f"rank {rank}: {fault}" for rank, own in enumerate(everyone) for fault in grown(own)]
    if RANK == 0:
        Console(width=120).print(table(everyone, option.every), "\n".join(faults) or "nothing grew")
    if RANKS > 1:
        dist.destroy_process_group()
    sys.exit(bool(faults))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--every", type=int, default=250, help="steps between two notes")
    return parser.parse_args()


def soak(steps: int, every: int, device: torch.device) -> list[Note]:
    """Train, and note the state of this process after every `every` steps."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(2 * RANKS)]
    batch = torch.zeros(ROWS * MICROBATCHES, WIDTH, device=device)
    pipe = graphpp.compile(
        nn.Sequential(*blocks),
        nn.functional.mse_loss,
        example=graphpp.Microbatch((batch[:ROWS],), target=batch[:ROWS]),
        split=RANKS,
        schedule="1F1B",
        microbatches=MICROBATCHES,
        parallel=graphpp.Parallel(device=device),
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    notes = []
    for done in range(1, steps + 1):
        x, y = (torch.randn(batch.shape, generator=generator).to(device) for _ in range(2))
        pipe.step(x, target=y)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if done % 10 == 0:
            pipe.eval(x, target=y)
        if done % every == 0:
            notes.append(Note.at_rest(notes))
    return notes


def grown(notes: Sequence[Note]) -> list[str]:
    """The figures that exceed the warm-up's by more than `BOUNDS`. Raises ValueError for fewer than 2 notes."""
    if len(notes) < 2:
        raise ValueError(f"{len(notes)} notes tell nothing about growth: take more steps, or note more often")
    first = max(1, len(notes) // 10)
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
