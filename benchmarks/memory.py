"""Measure the bytes of activations alive at the peak of a step, against eager torch.distributed.pipelining.

    torchrun --nproc-per-node 2 benchmarks/memory.py [--models llama gpt2] [--dims 64 256 512] [--schedules 1F1B] [--backend ..]

The contenders run the same model, weights, microbatches and schedule (contenders.py): torch, eager; graphpp by default;
graphpp with recomputation at 0.5 and "full". Losses must agree first.

Bytes: a census of storages. Every storage that an operator of the step makes is counted from its birth to its death: saved
activations, receive buffers, messages, temporary values of forward and backward. Not counted: storages from before the step
(parameters, inputs, and buffers that torch keeps from step to step, such as its receive buffers), storages that end as a
`param.grad`, and the workspace inside a kernel. The peak is that of one step after one to warm up; a ratio compares the
ranks' highest peaks, or the ranks' sums. "foretold": the plan's bytes, by the checker of schedules.

Times, in turn and without the census: the step, and the CPU seconds of all ranks (on a shared machine the steadier
figure), both divided by the default's; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import BACKENDS, TORCH, Case, Step, check_losses, pipeline, pipeline_step, plain_step, torch_step
from harness import RANK, RANKS, Contender, alternate, median_ratio, over_ranks, start, synchronize
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import NAMES, Size, add_sizes, workload

import graphpp
from graphpp.runtime.dtensors import local_tensor

CHOICES: dict[str, Any] = {"graphpp": None, "0.5": 0.5, "full": "full"}
MIB = 1 << 20


class Census(TorchDispatchMode):
    """Births and deaths of the storages that operators make while it is active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []  # (number of the storage, bytes more or less)
        self._living: dict[int, int] = {}  # id of the storage object -> its number
        self._born = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in given:
                self._enter(tensor.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._living:
            return
        number, nbytes = self._born, storage.nbytes()
        self._living[id(storage)], self._born = number, number + 1
        self.events.append((number, nbytes))
        weakref.finalize(storage, self._leave, id(storage), number, nbytes)

    def _leave(self, name: int, number: int, nbytes: int) -> None:
        self._living.pop(name, None)
        self.events.append((number, -nbytes))

    def peak(self, without: Iterable[torch.Tensor]) -> int:
        """The most bytes alive together, without the storages of the tensors in `without`."""
        left_out = {self._living.get(id(tensor.untyped_storage())) for tensor in without}
        live = most = 0
        for number, nbytes in self.events:
            live += 0 if number in left_out else nbytes
            most = max(most, live)
        return most


def allocated(run: Callable[[], object]) -> int:
    """The most bytes alive together of all that torch's allocator for the CPU gave out in a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    found: list[tuple[int, int, int]] = []  # (time, address, bytes more or less)
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}
    now = most = 0
    for _, address, nbytes in sorted(found, key=lambda each: each[0]):
        if nbytes > 0:
            alive[address] = nbytes
            now += nbytes
            most = max(most, now)
        else:
            now -= alive.pop(address, 0)  # memory of before the run
    return most


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def main() -> None:
    option = options()
    device = start()
    records = []
    for name, dim, schedule in product(option.models, option.dims, option.schedules):
        size = Size(dim, option.layers, option.length, dropout=0.0)
        case = Case(workload(name, size), schedule, option.microbatches, option.rows)
        records.append(record(case, option, device))
    if RANK == 0:
        Console(width=190).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama"], choices=NAMES)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"], choices=list(TORCH))
    parser.add_argument("--backend", default="eager", choices=BACKENDS, help="of graphpp")
    add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=9, help="of timing; 0: none")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def graphpp_step(case: Case, device: torch.device, backend: str, recompute: Any) -> tuple[Step, int]:
    """The pipeline that graphpp compiles, and the peak bytes that its plan foretells for this rank."""
    pipe = pipeline(case, device, backend, recompute=recompute)
    step = pipeline_step(pipe, case, device, backend)
    step.losses()
    return step, foretold_peak(pipe)


def foretold_peak(pipe: graphpp.Pipeline) -> int:
    """The bytes of activations and messages at the peak of a step on this rank, by the plan of a pipeline that has run one.

    Weights, gradients, optimizer and buffers of the benchmarks' models stand for the whole step.
    """
    assert pipe.plan.memory is not None
    own = pipe.plan.memory.ranks[RANK]
    return own.peak - (own.weights + own.gradients + own.optimizer + own.buffers)


def record(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Peaks of all contenders, then their times in turn."""
    made = {name: graphpp_step(case, device, option.backend, recompute) for name, recompute in CHOICES.items()}
    steps = {"torch": torch_step(case, device), **{name: step for name, (step, _) in made.items()}}
    check_losses(plain_step(case, device), steps, device)
    peaks = {name: [int(each[0]) for each in over_ranks([peak(step, device)])] for name, step in steps.items()}
    foretold = {name: [int(each[0]) for each in over_ranks([nbytes])] for name, (_, nbytes) in made.items()}
    slower = times(steps, option.rounds, device) if option.rounds else {}
    size = case.workload.size
    return {
        "model": case.workload.name,
        "dim": size.dim,
        "layers": size.layers,
        "schedule": case.schedule,
        "backend": option.backend,
        "ranks": RANKS,
        "microbatches": case.microbatches,
        "tokens": case.rows * size.length,
        "device": device.type,
        "peaks": peaks,
        "foretold": foretold,
        "times": slower,
    }


def peak(step: Step, device: torch.device, *, fresh: bool = True) -> float:
    """The peak of one step on this rank, after one to warm up, in bytes. `fresh`: without gradients from the step before.

    The plan counts sums of gradients for the whole step, as they stand where gradients are not set to None. In a fresh step the
    first microbatch's gradients become the sums, so a peak in its backward is lower by those that the plan counts once more.
    """
    for census in (None, Census()):
        if fresh:
            step.forget_gradients()
        if census is None:
            step.losses()
        else:
            with census:
                kept = step.losses()
            del kept
        synchronize(device)
    return float(census.peak([local_tensor(p.grad) for p in step.parameters if p.grad is not None]))


def times(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Each contender's step time, and its CPU time on all ranks, divided by the default's: medians over rounds."""
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(contenders, 2, device)
    samples = alternate(contenders, rounds, device)
    figures = ("seconds", "cpu")
    return {name: [median_ratio(taken, samples["graphpp"], f) for f in figures] for name, taken in samples.items()}


def table(records: list[dict[str, Any]]) -> Table:
    """One line per case and contender."""
    first = records[0]
    title = f"{first['ranks']} ranks, {first['device']}, {first['layers']} layers, {first['backend']}, "
    title += f"{first['microbatches']} microbatches of {first['tokens']} tokens"
    shown = Table(title=title, title_justify="left", caption="MiB at the peak, by rank; time, cpu: over graphpp's default")
    for column in ("model", "dim", "schedule", "", "peak MiB", "foretold MiB", "highest / torch", "sum / torch", "time", "cpu"):
        shown.add_column(column, justify="right")
    for row in records:
        for name, found in row["peaks"].items():
            shown.add_row(*line(row, name, found))
    return shown


def line(row: dict[str, Any], name: str, found: list[int]) -> list[str]:
    """One contender's cells."""
    torchs = row["peaks"]["torch"]
    spelled: Callable[[list[int]], str] = lambda each: " ".join(f"{nbytes / MIB:.2f}" for nbytes in each)  # noqa: E731
    return [
        row["model"],
        str(row["dim"]),
        row["schedule"],
        name,
        spelled(found),
        spelled(row["foretold"].get(name, [])),
        f"{max(found) / max(torchs):.2f}",
        f"{sum(found) / sum(torchs):.2f}",
        *(f"{ratio:.2f}" for ratio in row["times"].get(name, [])),
    ]


if __name__ == "__main__":
    main()
