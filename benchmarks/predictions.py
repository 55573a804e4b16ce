"""Compare predicted steps with measured ones: seconds, and bytes of activations and messages at the peak.

    torchrun --nproc-per-node 2 benchmarks/predictions.py [--dims 64 256 512] [--backends eager inductor] [--schedules ..]
        [--mesh dp_shard=2 | dp_replicate=2 | tp=2]

Each case is a model, a backend and a schedule. Two predictions of the seconds of a step:

    own      `pipe.profile(..).predict()`: the simulator, by the costs that were measured in the same pipeline
    one      the simulator, by the costs that were measured under one schedule with as many stages a rank (1F1B, or
             Interleaved1F1B): a schedule is judged before it has run

The cases with as many stages a rank take turns, in several rounds. In each round every case runs some steps, is profiled, and
runs as many steps again. A prediction over the median step of its own round, less 1, is its error
in the round, so a machine that becomes slower from one round to the next is no error. The table has the median over rounds.
"spread": half of the distance between the quartiles of all steps, as a share of their median.

--mesh: the ranks along `pp` are all divided by those of the dimension. Ranks that share cores are no fair test of seconds.

Bytes: the plan's peak of all that a step adds to parameters and gradients, against a census of storages (memory.py) in a step
that adds to gradients, the rank with the larger error. Compiled code and shards take memory that the census does not see:
with them, on a CPU, the count is that of the allocator, which has the workspaces of kernels too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import BACKENDS, TORCH, Case, Step, pipeline, pipeline_step
from harness import RANK, RANKS, over_ranks, start, synchronize, wait_for_all
from memory import allocated, peak
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from workloads import NAMES, Size, add_sizes, workload

import graphpp
from graphpp.runtime.dtensors import local_tensor

OWN = ("ZB1P", "ZB2P", "V-Half", "V-Min")
PREDICTIONS = ("own", "one")
TYPICAL = {1: "1F1B", 2: "Interleaved1F1B"}  # by stages of a rank


@dataclass
class Found:
    """One case: seconds of steps, each round's errors by prediction, and bytes (predicted, measured) of the worst rank."""

    dim: int
    backend: str
    schedule: str
    steps: list[float] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)
    nbytes: tuple[int, int] | None = None

    @property
    def measured(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        low, _, high = statistics.quantiles(self.steps)
        return (high - low) / 2 / self.measured

    def error(self, prediction: str) -> float | None:
        errors = self.errors.get(prediction)
        return statistics.median(errors) if errors else None

    def add(self, steps: Sequence[float], predicted: Mapping[str, float]) -> None:
        """Add a round."""
        self.steps += steps
        for name, seconds in predicted.items():
            self.errors.setdefault(name, []).append(seconds / statistics.median(steps) - 1)


@dataclass(frozen=True)
class Running:
    """A case with its pipeline."""

    case: Case
    pipe: graphpp.Pipeline
    step: Step
    found: Found


def main() -> None:
    option = options()
    pin()
    device = start()
    mesh = made_mesh(option.mesh, device)
    found = [each for group in product(option.dims, option.backends) for each in cases(option, *group, device, mesh)]
    if RANK == 0:
        Console(width=150).print(table(found))
        for line in summary(found):
            print(line)
        if option.json:
            Path(option.json).write_text(json.dumps([vars(each) for each in found], indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def pin() -> None:
    """Give this rank a core of its own where there are enough: two ranks on one core for a moment make a step uneven."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= RANKS and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[RANK]})


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama", choices=NAMES)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--schedules", nargs="+", default=[*TORCH, *OWN])
    add_sizes(parser)
    parser.add_argument("--mesh", help="another dimension of the mesh than pp, and its ranks: dp_shard=2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a case in a round")
    parser.add_argument("--profiled", type=int, default=5, help="steps of a profile")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def made_mesh(option: str | None, device: torch.device) -> DeviceMesh | None:
    """The mesh of `pp` and one more dimension; None: all ranks are those of the pipeline."""
    if option is None:
        return None
    name, _, count = option.partition("=")
    return init_device_mesh(device.type, (RANKS // int(count), int(count)), mesh_dim_names=("pp", name))


def cases(
    option: argparse.Namespace, dim: int, backend: str, device: torch.device, mesh: DeviceMesh | None
) -> Iterator[Found]:
    """All schedules of one size and backend; those with as many stages a rank take turns."""
    size = Size(dim, option.layers, option.length, dropout=0.0)
    ranks = RANKS if mesh is None else mesh["pp"].size()
    base = Case(workload(option.model, size), "1F1B", option.microbatches, option.rows, ranks)
    for each, typical in TYPICAL.items():
        named = [replace(base, schedule=name) for name in option.schedules]
        group = [case for case in named if case.stages // ranks == each]
        group.sort(key=lambda case: case.schedule != typical)  # its costs predict the others
        running = [started(case, device, backend, mesh) for case in group]
        for _ in range(option.rounds):
            a_round(running, option, device)
        for one in running:
            eager = backend == "eager" and not (option.mesh or "").startswith("dp_shard")
            if eager or device.type == "cpu":
                measured = peak(one.step, device, fresh=False) if eager else allocated_bytes(one.step)
                one.found.nbytes = peaks(one, measured, RANK if mesh is None else mesh["pp"].get_local_rank())
            yield one.found


def started(case: Case, device: torch.device, backend: str, mesh: DeviceMesh | None) -> Running:
    pipe = pipeline(case, device, backend, mesh=mesh)
    step = pipeline_step(pipe, case, device, backend)
    timed(step, 2, device)
    return Running(case, pipe, step, Found(case.workload.size.dim, backend, str(case.schedule)))


def a_round(running: Sequence[Running], option: argparse.Namespace, device: torch.device) -> None:
    """Each case's steps, and its predictions of them."""
    typical: graphpp.Profile | None = None
    for each in running:
        steps = timed(each.step, option.steps // 2, device)
        inputs, targets = each.case.batch(device)
        profile = each.pipe.profile(inputs, target=targets, repeat=option.profiled)
        steps += timed(each.step, option.steps - option.steps // 2, device)
        if each.case.schedule in TYPICAL.values():
            typical = profile
        each.found.add(steps, predictions(profile, typical))


def timed(step: Step, rounds: int, device: torch.device) -> list[float]:
    """The seconds of the slowest rank in steps in a row, as a training runs them: nothing empties the processor's caches."""
    mine = []
    for _ in range(rounds):
        step.forget_gradients()
        wait_for_all(device)
        began = time.perf_counter()
        step.losses()
        synchronize(device)
        mine.append(time.perf_counter() - began)
    return [max(each) for each in zip(*over_ranks(mine), strict=True)]


def predictions(own: graphpp.Profile, typical: graphpp.Profile | None) -> dict[str, float]:
    """The seconds of a step, by the kind of prediction."""
    found, schedule = {"own": own.predict()}, own.timeline.schedule
    if typical is not None:
        found["one"] = typical.predict(schedule)
    return found


def allocated_bytes(step: Step, steps: int = 3) -> float:
    """The peak of the allocator in the step with the least: gloo's threads may let go of messages a moment late."""
    return float(min(allocated(step.losses) for _ in range(steps)))


def peaks(running: Running, measured: float, rank: int) -> tuple[int, int]:
    """The bytes of a step beside parameters and gradients, predicted and measured, of the rank where they differ most.

    `rank`: this process's, along `pp`. The step before has left gradients.
    """
    grads = sum(local_tensor(each.grad).nbytes for each in running.step.parameters if each.grad is not None)
    rows = sum(local_tensor(each).nbytes for each in running.step.parameters)
    memory = running.pipe.plan.memory
    assert memory is not None
    own = memory.ranks[rank]
    foretold = own.peak - (own.optimizer + own.buffers + rows + grads)
    worst = max(over_ranks([float(foretold), measured]), key=lambda pair: abs(pair[0] / pair[1] - 1))
    return round(worst[0]), round(worst[1])


def table(found: Sequence[Found]) -> Table:
    """One line a case."""
    title = f"{RANKS} ranks; errors: predicted over measured, less 1"
    shown = Table(title=title, title_justify="left")
    for column in ("d", "backend", "schedule", "step ms", "spread", *PREDICTIONS, "peak MiB", "bytes"):
        shown.add_column(column, justify="right")
    for each in found:
        errors = ("" if each.error(name) is None else f"{each.error(name):+.1%}" for name in PREDICTIONS)
        predicted, measured = each.nbytes or (0, 0)
        of_bytes = (f"{measured / 2**20:.1f}", f"{predicted / measured - 1:+.1%}") if measured else ("", "")
        shown.add_row(
            str(each.dim), each.backend, each.schedule, f"{each.measured * 1e3:.1f}", f"{each.spread:.1%}", *errors, *of_bytes
        )
    return shown


def summary(found: Sequence[Found]) -> Iterator[str]:
    """For each kind of prediction: the mean error, the spread of the errors, and how many are within 5 %."""
    for name in PREDICTIONS:
        errors = [error for each in found if (error := each.error(name)) is not None]
        if len(errors) > 1:
            within = sum(abs(error) <= 0.05 for error in errors)
            yield (
                f"{name}: mean error {statistics.fmean(errors):+.1%}, standard deviation {statistics.stdev(errors):.1%}, "
                f"{within} of {len(errors)} within 5 %"
            )
    counted = [each.nbytes for each in found if each.nbytes is not None]
    exact = sum(abs(predicted / measured - 1) <= 0.02 for predicted, measured in counted)
    yield f"bytes: {exact} of {len(counted)} within 2 %"


if __name__ == "__main__":
    main()
