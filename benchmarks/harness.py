"""Shared by the benchmarks: the ranks' device, fair timing of several contenders in turn, and records.

Contract: `alternate(contenders, rounds)` runs A B C A B C .. and returns the samples of each contender. Every run starts at a
barrier with the garbage collector off and ends, on CUDA, with a synchronise. `prepare` of a contender runs before each
of its runs, outside the time. Warming up is the caller's task.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Contender:
    """A function to time. `everywhere`: all ranks run it; else rank 0 alone runs it while the others wait."""

    run: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    everywhere: bool = True


@dataclass(frozen=True)
class Sample:
    """One run: `seconds` of the slowest rank, `cpu` seconds and page `faults` of all ranks together.

    On a shared machine `seconds` also contain other people's work; `cpu` hardly does.
    """

    seconds: float
    cpu: float
    faults: float


def start(threads: int = 1) -> torch.device:
    """Join the ranks over gloo, and on GPUs over NCCL; this rank's device.

    Ranks share the GPUs where there are more ranks than GPUs and NCCL_MULTI_RANK_GPU_ENABLE=1 is set; else they use the CPU.
    """
    torch.set_num_threads(threads)
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = gpus > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank % gpus) if gpus >= local or shared else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if RANKS > 1:
        gpu = device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None)
    return device


def alternate(contenders: Mapping[str, Contender], rounds: int, device: torch.device) -> dict[str, list[Sample]]:
    """Samples of each contender in each round, the same on every rank."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            samples[name].append(sample(contender, device))
    return samples


def sample(contender: Contender, device: torch.device) -> Sample:
    """One run."""
    contender.prepare()
    gc.collect()
    gc.disable()
    try:
        wait_for_all(device)
        began = usage()
        if contender.everywhere or RANK == 0:
            contender.run()
        synchronize(device)
        spent = [after - before for after, before in zip(usage(), began, strict=True)]
        everyone = over_ranks(spent)
    finally:
        gc.enable()
    working = everyone if contender.everywhere else everyone[:1]
    seconds, cpu, faults = zip(*working, strict=True)
    return Sample(max(seconds), sum(cpu), sum(faults))


def usage() -> tuple[float, float, float]:
    """The clock in seconds, and the CPU seconds and page faults of this process so far."""
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes() -> int:
    """The resident bytes of the process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def wait_for_all(device: torch.device) -> None:
    """A barrier of the ranks and, on CUDA, of the device."""
    synchronize(device)
    if RANKS > 1:
        dist.barrier()


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def over_ranks(values: list[float]) -> list[list[float]]:
    """Every rank's values, by rank."""
    if RANKS == 1:
        return [values]
    everyone: list[list[float]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(everyone, values)
    return everyone


def medians(samples: Iterable[Sample]) -> Sample:
    """The median of each figure."""
    return Sample(*(statistics.median(values) for values in zip(*map(astuple, samples), strict=True)))


def median_ratio(above: Iterable[Sample], below: Iterable[Sample], figure: str = "seconds") -> float:
    """The median over rounds of above / below: a disturbance that both met in one round (a busy machine) cancels."""
    return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in zip(above, below, strict=True))
