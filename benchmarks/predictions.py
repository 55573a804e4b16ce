"""Compare predicted steps with measured ones: seconds, and bytes of activations and messages at the peak.

    torchrun --nproc-per-node 2 benchmarks/predictions.py [--dims 64 256 512] [--backends eager inductor] [--schedules ..]

Each case is a model, a backend and a schedule. Three predictions of the seconds of a step:

    own      `pipe.profile(..).predict()`: the simulator, by the costs that were measured in the same pipeline
    one      the simulator, by the costs that were measured under one schedule with as many stages a rank (1F1B, or
             Interleaved1F1B): a schedule is judged before it has run
    layers   the same with the seconds of stages that were timed alone, without a pipeline (`graphpp.stage_costs`)

An error is predicted over measured, less 1. Measured: the median of the slowest rank's seconds over steps in a row; "spread":
half of the distance between the quartiles, as a share of the median, which is how well any prediction can be told right.
Bytes: the plan's peak of activations and messages against a census of storages (memory.py) in a step that adds to gradients,
the rank with the larger error; of eager steps, for the census does not see the memory that compiled code takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import BACKENDS, TORCH, Case, Step, pipeline, pipeline_step
from harness import RANK, RANKS, over_ranks, start, synchronize, wait_for_all
from memory import foretold_peak, peak
from rich.console import Console
from rich.table import Table
from workloads import NAMES, Size, add_sizes, workload

import graphpp

OWN = ("ZB1P", "ZB2P", "V-Half", "V-Min")
PREDICTIONS = ("own", "one", "layers")
TYPICAL = {1: "1F1B", 2: "Interleaved1F1B"}  # by stages of a rank


@dataclass(frozen=True)
class Found:
    """One case: seconds of steps, predictions of them, and bytes (predicted, measured) of the rank that is further off."""

    dim: int
    backend: str
    schedule: str
    steps: Sequence[float]
    predicted: Mapping[str, float]
    nbytes: tuple[int, int] | None

    @property
    def measured(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        low, _, high = statistics.quantiles(self.steps)
        return (high - low) / 2 / self.measured

    def error(self, prediction: str) -> float | None:
        seconds = self.predicted.get(prediction)
        return None if seconds is None else seconds / self.measured - 1


def main() -> None:
    option = options()
    pin()
    device = start()
    found = [each for group in product(option.dims, option.backends) for each in cases(option, *group, device)]
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
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of a case")
    parser.add_argument("--profiled", type=int, default=9, help="steps of a profile")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def cases(option: argparse.Namespace, dim: int, backend: str, device: torch.device) -> Iterator[Found]:
    """All schedules of one size and backend, the typical ones first, whose costs predict the others."""
    size = Size(dim, option.layers, option.length, dropout=0.0)
    base = Case(workload(option.model, size), "1F1B", option.microbatches, option.rows)
    profiles: dict[int, graphpp.Profile] = {}
    alone: dict[int, graphpp.Costs] = {}
    for name in sorted(option.schedules, key=lambda name: name not in TYPICAL.values()):
        case = replace(base, schedule=name)
        pipe = pipeline(case, device, backend)
        step = pipeline_step(pipe, case, device, backend)
        timed(step, 2, device)
        steps = timed(step, option.rounds // 2, device)
        inputs, targets = case.batch(device)
        profile = pipe.profile(inputs, target=targets, repeat=option.profiled)
        steps += timed(step, option.rounds - option.rounds // 2, device)
        each = case.stages // RANKS
        if name == TYPICAL.get(each):
            profiles[each], alone[each] = profile, timed_alone(case, backend)
        predicted = predictions(profile, profiles.get(each), alone.get(each))
        nbytes = peaks(pipe, step, device) if backend == "eager" else None
        yield Found(dim, backend, name, steps, predicted, nbytes)


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


def timed_alone(case: Case, backend: str) -> graphpp.Costs:
    """The costs of the stages as `graphpp.stage_costs` has them, which the ranks call at the same time; their mean."""
    inputs, targets = case.workload.batch(case.rows)
    split = [f"layers.{layer}" for layer in case.cuts[1:-1]]
    example = graphpp.Microbatch((inputs,), target=targets)
    found = graphpp.stage_costs(
        case.workload.model(), case.workload.loss, example, split=split, schedule=case.schedule, ranks=RANKS, backend=backend
    )
    rows = over_ranks([number for each in found.stages for number in seconds_of(each)])
    means = [statistics.fmean(numbers) for numbers in zip(*rows, strict=True)]
    stages = (
        replace(each, forward=means[at], input_grad=means[at + 1], weight_grad=means[at + 2], backward=means[at + 3])
        for at, each in zip(range(0, len(means), 4), found.stages, strict=True)
    )
    return replace(found, stages=tuple(stages))


def seconds_of(stage: graphpp.StageCosts) -> list[float]:
    """The seconds of F, I, W and B."""
    whole = stage.input_grad + stage.weight_grad if stage.backward is None else stage.backward
    return [stage.forward, stage.input_grad, stage.weight_grad, whole]


def predictions(
    own: graphpp.Profile, typical: graphpp.Profile | None, alone: graphpp.Costs | None
) -> dict[str, float]:
    """The seconds of a step, by the kind of prediction."""
    found, schedule = {"own": own.predict()}, own.timeline.schedule
    if typical is not None:
        found["one"] = typical.predict(schedule)
        if alone is not None:
            costs = replace(typical.costs, stages=alone.stages)
            found["layers"] = replace(typical, costs=costs).predict(schedule)
    return found


def peaks(pipe: graphpp.Pipeline, step: Step, device: torch.device) -> tuple[int, int]:
    """The bytes of activations and messages at the peak, predicted and measured, of the rank where they differ most."""
    rows = over_ranks([float(foretold_peak(pipe)), peak(step, device, fresh=False)])
    worst = max(rows, key=lambda pair: abs(pair[0] / pair[1] - 1))
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
