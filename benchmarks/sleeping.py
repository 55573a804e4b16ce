"""Compare a step of ranks that compute without a core with the simulated one, schedule by schedule.

    torchrun --nproc-per-node 4 benchmarks/sleeping.py [--ms 20 5] [--schedules 1F1B ZBVZeroBubble searched] [--others torch]
    torchrun --nproc-per-node 8 benchmarks/sleeping.py --ms 20 --schedules recomputed ahead --others

A stage's computations sleep (sleeping_stages.py), so 4, 8 or 16 processes on 2 cores run a pipeline whose step takes exactly as
long as its table says, plus what the runner, the messages and the other processes cost. F, I and W of a rank take --ms each
for a microbatch, with several stages a rank together. Microbatches: --times the ranks.

    simulated       the makespan of the table with these times and messages that take none
    with messages   the same with the time of a message between two of these ranks, as `pipe.profile` measures it
    graphpp         the pipeline that `graphpp.compile` makes, whole `pipe.step`, losses on all ranks
    torch           torch's runtime over manual stages with the same operators, where torch has the schedule

`searched` is the table of `graphpp.schedule_auto` for two stages a rank. `recomputed` is 1F1B with `memory="full"`, whose
backwards take one F longer; `ahead` is the same after `graphpp.schedules.recompute_ahead` within its bytes.

With --plan, a file with the JSON of a `TrainingPlan` or `TrainingPlans` (whose first plan counts), its table and the times of
its stages, --scale times as long, replace all other schedules; whole backwards take the times of I and W, and messages none.

Before timing, the losses of all contenders must be equal. A sample is --steps steps in a row, divided by their number. "over"
is the median sample over a simulated makespan, minus 1.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import TORCH, Case, Step, check_losses, pipeline, pipeline_step, torch_step
from harness import RANK, RANKS, Contender, Sample, alternate, medians, start
from rich.console import Console
from rich.table import Table
from sleeping_stages import alike, costs, product_costs, product_workload, workload

import graphpp
from graphpp.schedules.generate.names import SCHEDULES

SEARCHED, RECOMPUTED, AHEAD = "searched", "recomputed", "ahead"
FURTHER = (SEARCHED, RECOMPUTED, AHEAD)
NAMED = tuple(name for name in SCHEDULES if name not in ("auto", "ForwardOnly"))


def main() -> None:
    option = options()
    device = start()
    records = []
    for ms in option.ms[:1] if option.plan else option.ms:
        for name in [option.plan] if option.plan else option.schedules:
            records.append(record(name, ms, option, device))
            if RANK == 0:
                print(f"{ms:g} ms, {name}: {100 * records[-1]['over']:.1f} % over", flush=True)
    if RANK == 0:
        Console(width=150).print(shown(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, nargs="+", default=[20.0, 5.0], help="of F, of I and of W, a rank and microbatch")
    parser.add_argument("--schedules", nargs="+", default=[*NAMED, SEARCHED], choices=[*NAMED, *FURTHER])
    parser.add_argument("--others", nargs="*", default=["torch"], choices=["torch"], help="contenders besides graphpp")
    parser.add_argument("--times", type=int, default=2, help="microbatches for each rank")
    parser.add_argument("--numbers", type=int, default=64, help="in the value that a message carries")
    parser.add_argument("--steps", type=int, default=3, help="in a row, for one sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--effort", type=float, default=1.0, help="of the search")
    parser.add_argument("--plan", help="file of a plan, in place of the schedules")
    parser.add_argument("--scale", type=float, default=1.0, help="of the times of a plan's stages")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


# --------------------------------------------------------------------------------------------------------- one schedule


@dataclass(frozen=True)
class Sleeping:
    """A case, and the times of its stages in seconds."""

    case: Case
    costs: graphpp.Costs
    recompute: str | None = None

    @classmethod
    def of(cls, name: str, seconds: float, option: argparse.Namespace) -> Sleeping:
        """`seconds`: of F, of I and of W, for all stages of a rank together."""
        microbatches = option.times * RANKS
        if name in (RECOMPUTED, AHEAD):
            return cls.of_products(name, seconds, microbatches, option.numbers)
        searched = name == SEARCHED
        stages = 2 * RANKS if searched else Case(workload(1, alike(1, 0.0)), name, microbatches, 1).stages
        times = alike(stages, seconds * RANKS / stages)
        schedule = search(costs(times), microbatches, option.effort) if searched else name
        return cls(Case(workload(option.numbers, times), schedule, microbatches, 1), costs(times))

    @classmethod
    def of_plan(cls, file: str, option: argparse.Namespace) -> Sleeping:
        """The table and the stage times of a plan, scaled."""
        plan = graphpp.TrainingPlans.from_json(Path(file)).best
        assert plan.costs is not None
        table, stages = plan.table(), plan.costs.stages
        times = [(each.forward, each.input_grad, each.weight_grad) for each in stages]
        scaled = [(option.scale * on, option.scale * first, option.scale * second) for on, first, second in times]
        return cls(Case(workload(option.numbers, scaled), table, table.microbatches, 1), costs(scaled))

    @classmethod
    def of_products(cls, name: str, seconds: float, microbatches: int, numbers: int) -> Sleeping:
        times, table = product_costs(RANKS, seconds), graphpp.schedules.one_f_one_b(RANKS, RANKS, microbatches)
        if name == AHEAD:
            cap = graphpp.schedules.peak_bytes(table, times)
            table = replace(graphpp.schedules.recompute_ahead(table, times, cap), name="1F1B, recomputed ahead")
        return cls(Case(product_workload(numbers, RANKS, seconds), table, microbatches, 1), times, "full")

    def makespan(self, messages: graphpp.Costs | None = None) -> float:
        """Seconds of a step, as simulated; `messages`: costs of which the times of the messages are taken."""
        times = self.costs
        if messages is not None:
            times = replace(times, sends_forward=messages.sends_forward, sends_backward=messages.sends_backward)
        return graphpp.simulate(self.case.table, times).makespan


def search(times: graphpp.Costs, microbatches: int, effort: float) -> graphpp.Schedule:
    """The table that rank 0 finds, on every rank."""
    found: list[Any] = [None]
    if RANK == 0:
        found = [graphpp.schedule_auto(times, ranks=RANKS, microbatches=microbatches, effort=effort, name=SEARCHED)]
    if RANKS > 1:
        dist.broadcast_object_list(found)
    assert isinstance(found[0], graphpp.Schedule)
    return found[0]


def record(name: str, ms: float, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time the contenders in turn."""
    sleeping = Sleeping.of_plan(name, option) if option.plan else Sleeping.of(name, ms / 1e3, option)
    case = sleeping.case
    pipe = pipeline(case, device, recompute=sleeping.recompute)
    steps = {"graphpp": pipeline_step(pipe, case, device)}
    if "torch" in option.others and name in TORCH:
        steps["torch"] = torch_step(case, device)
    check_losses(steps["graphpp"], steps, device)
    messages = profiled(pipe, case, device)
    runs = {each: Contender(in_a_row(step, option.steps)) for each, step in steps.items()}
    taken = alternate(runs, option.rounds, device)
    samples = {each: [per_step(run, option.steps) for run in own] for each, own in taken.items()}
    simulated = sleeping.makespan()
    return {
        "schedule": name,
        "ms": ms,
        "ranks": RANKS,
        "microbatches": case.microbatches,
        "simulated": simulated,
        "with_messages": sleeping.makespan(messages),
        "over": over(samples["graphpp"], simulated),
        "samples": {each: [asdict(sample) for sample in own] for each, own in samples.items()},
    }


def in_a_row(step: Step, steps: int) -> Callable[[], None]:
    """Steps as in training: a rank that has its losses goes on, and its gradients are its own."""

    def run() -> None:
        for _ in range(steps):
            step.losses()
            step.forget_gradients()

    return run


def per_step(run: Sample, steps: int) -> Sample:
    return Sample(*(value / steps for value in astuple(run)))


def profiled(pipe: graphpp.Pipeline, case: Case, device: torch.device) -> graphpp.Costs:
    inputs, targets = case.batch(device)
    return pipe.profile(inputs, target=targets, repeat=1).costs


def over(samples: list[Sample], makespan: float) -> float:
    """How much longer than the makespan the median step took, as a share."""
    return medians(samples).seconds / makespan - 1


# ------------------------------------------------------------------------------------------------------------- results


def shown(records: list[dict[str, Any]]) -> Table:
    first = records[0]
    title = f"{RANKS} ranks on {os.cpu_count()} cores, {first['microbatches']} microbatches: ms of a step"
    table = Table(title=title, title_justify="left")
    for column in ("ms", "schedule"):
        table.add_column(column, no_wrap=True)
    columns = ("simulated", "with messages", "graphpp", "over", "over with messages", "torch", "over", "cpu ms a rank", "torch")
    for column in columns:
        table.add_column(column, justify="right")
    for each in records:
        table.add_row(*line(each))
    return table


def line(record: Mapping[str, Any]) -> list[str]:
    """One record as cells."""
    samples = {name: [Sample(**each) for each in taken] for name, taken in record["samples"].items()}
    simulated, messages = record["simulated"], record["with_messages"]
    ours, theirs = samples["graphpp"], samples.get("torch")
    return [
        f"{record['ms']:g}",
        record["schedule"],
        f"{1e3 * simulated:.1f}",
        f"{1e3 * messages:.1f}",
        f"{1e3 * medians(ours).seconds:.1f}",
        f"{100 * over(ours, simulated):.1f} %",
        f"{100 * over(ours, messages):.1f} %",
        "" if theirs is None else f"{1e3 * medians(theirs).seconds:.1f}",
        "" if theirs is None else f"{100 * over(theirs, simulated):.1f} %",
        f"{1e3 * medians(ours).cpu / RANKS:.1f}",
        "" if theirs is None else f"{1e3 * medians(theirs).cpu / RANKS:.1f}",
    ]


if __name__ == "__main__":
    main()
