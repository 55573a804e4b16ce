"""Time the calls of a checkpoint by size: save, the part of a background save that the training waits for, and load.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_times.py [--megabytes 50 200 800] [--folder /tmp] [--memory /dev/shm]

A stack of linear layers with about --megabytes of fp32 parameters over all ranks, and AdamW, whose state is twice that. Rounds:
save, a save in the background until `async_save` returns, the whole of it, and load. "copy" is the time in which this process
copies the same tensors, into new memory: the bound of a background save is 1.2 times that. "local" and "local load" are a save
of `checkpoint.local` and its load, where each rank has a folder of its own in --memory, as if on a machine of its own, so that
every part is sent to another rank. Medians; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import RANK, RANKS, over_ranks, start
from rich.console import Console
from rich.table import Table
from torch import nn

import graphpp

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))  # a folder in memory, by convention of Linux
    option = parser.parse_args()
    start()
    calls = ("written", "load", "local", "local wait", "local load")
    shown = Table("MB of a rank", "save s", "wait s", "copy s", "wait / copy", *(f"{name} s" for name in calls))
    for megabytes in option.megabytes:
        nbytes, times = measured(megabytes, option.rounds, option.folder, option.memory)
        ratio = times["wait"] / times["copy"]
        figures = [times["save"], times["wait"], times["copy"], ratio]
        figures += [times[name] for name in calls]
        shown.add_row(f"{nbytes / 1e6:.0f}", *(f"{each:.3f}" for each in figures))
    if RANK == 0:
        Console(width=120).print(shown)
    if RANKS > 1:
        dist.destroy_process_group()


def measured(megabytes: int, rounds: int, folder: Path, memory: Path) -> tuple[int, dict[str, float]]:
    """The bytes of a rank's checkpoint, and the median seconds of each call, of the slowest rank."""
    layers = max(RANKS, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), torch.ones(RANKS, WIDTH)
    example = graphpp.Microbatch((x[:1],), target=x[:1])
    pipe = graphpp.compile(model, nn.functional.mse_loss, example=example, split=RANKS, schedule="1F1B", microbatches=RANKS)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(x, target=x)
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [tensor.detach() for tensor in (*pipe.parameters(), *state)]
    checkpoint, path = pipe.checkpoint(optimizer), folder / "graphpp-checkpoint-times"
    local = checkpoint.local(memory / f"graphpp-checkpoint-times-{RANK}")
    taken: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        taken.setdefault("save", []).append(seconds(lambda: checkpoint.save(path)))
        taken.setdefault("copy", []).append(seconds(lambda: [tensor.clone() for tensor in tensors]))
        began = time.perf_counter()
        pending = checkpoint.async_save(path)
        taken.setdefault("wait", []).append(over_ranks_most(time.perf_counter() - began))
        pending.wait()
        taken.setdefault("written", []).append(over_ranks_most(time.perf_counter() - began))
        taken.setdefault("load", []).append(seconds(lambda: checkpoint.load(path)))
        taken.setdefault("local", []).append(seconds(local.save))
        began = time.perf_counter()
        pending = local.async_save()
        taken.setdefault("local wait", []).append(over_ranks_most(time.perf_counter() - began))
        pending.wait()
        taken.setdefault("local load", []).append(seconds(local.load))
    for used in (path, memory / f"graphpp-checkpoint-times-{RANK}"):
        shutil.rmtree(used, ignore_errors=True)
    return sum(tensor.nbytes for tensor in tensors), {name: statistics.median(each[1:]) for name, each in taken.items()}


def seconds(call: Callable[[], object]) -> float:
    """The time of a call on the slowest rank."""
    over_ranks_most(0.0)
    began = time.perf_counter()
    call()
    return over_ranks_most(time.perf_counter() - began)


def over_ranks_most(value: float) -> float:
    """The largest of all ranks' values."""
    return max(float(each[0]) for each in over_ranks([value]))


if __name__ == "__main__":
    main()
