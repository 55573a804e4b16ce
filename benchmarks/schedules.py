"""Compare all schedules on one model: measured, simulated, and run by torch.

    torchrun --nproc-per-node 2 benchmarks/schedules.py [--dim 256] [--schedules 1F1B V-Min ..]     (also with 4)
    torchrun --nproc-per-node 4 benchmarks/schedules.py --backend inductor --schedules Interleaved1F1B ZBVZeroBubble ..

All schedules run one model with one seed over the same microbatches, in turn, round by round. Next to torch's schedules,
torch's runtime runs the same ones on manual stages (eager; shapes given; --no-torch leaves them out). Losses must agree
to 1e-5 first, 1e-4 where compiled. For each schedule: step time (median of the slowest rank), ratio to graphpp's
Interleaved1F1B and to torch's run of the same schedule (medians of the rounds' ratios), the bubble (mean over ranks)
measured and simulated from the profile's costs, the simulated step against the measured one, the most activation bytes
alive on a rank by the checker.

"of what is simulated": where the simulator, by each schedule's own profile, says that a schedule is faster than
Interleaved1F1B, the share of that gain in the measured ratio. Gains below GAIN are left out: costs are measured too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import BACKENDS, TORCH, Case, Step, check_losses, pipeline, pipeline_step, plain_step, torch_step
from harness import RANK, RANKS, Contender, Sample, alternate, median_ratio, medians, start
from rich.console import Console
from rich.table import Table
from workloads import NAMES, Size, add_sizes, workload

import graphpp

BASE = "Interleaved1F1B"
OWN = ("MegatronInterleaved", "ZB1P", "ZB2P", "V-Half", "V-Min", "Combined1F1B", "searched")
GAIN = 0.005  # the least simulated gain, as a share of a step, that is compared with the measured one


def main() -> None:
    option = options()
    device = start()
    size = Size(option.dim, option.layers, option.length, dropout=0.0)
    case = Case(workload(option.model, size), BASE, option.microbatches, option.rows)
    records = measured(case, option, device)
    if RANK == 0:
        Console(width=180).print(table(case, option.backend, records, device))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama", choices=NAMES)
    parser.add_argument("--backend", default="eager", choices=BACKENDS)
    parser.add_argument("--dim", type=int, default=256)
    add_sizes(parser)
    parser.add_argument("--schedules", nargs="+", default=[*TORCH, *OWN])
    parser.add_argument("--no-torch", action="store_true", help="graphpp's schedules only")
    parser.add_argument("--profiled", type=int, default=3, help="steps of a profile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def measured(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """All schedules: samples of the steps, and the figures of profile, simulator and checker."""
    cases = {name: replace(case, schedule=name) for name in option.schedules if name != "searched"}
    pipes = {name: pipeline(each, device, option.backend) for name, each in cases.items()}
    profiles = {name: profile(cases[name], pipe, option.profiled, device) for name, pipe in pipes.items()}
    if "searched" in option.schedules:
        cases["searched"] = replace(case, schedule=searched(case, profiles))
        pipes["searched"] = pipeline(cases["searched"], device, option.backend)
        profiles["searched"] = profile(cases["searched"], pipes["searched"], option.profiled, device)
    steps = {name: pipeline_step(pipe, cases[name], device, option.backend) for name, pipe in pipes.items()}
    steps |= {f"torch {name}": torch_step(cases[name], device) for name in others(option)}
    samples = timed(steps, case, option.rounds, device)
    records = {name: record(name, pipes[name], profiles[name], samples) for name in pipes}
    return {name: found | {"of simulated": of_simulated(found, records.get(BASE))} for name, found in records.items()}


def profile(case: Case, pipe: graphpp.Pipeline, repeat: int, device: torch.device) -> graphpp.Profile:
    """The profile of a step."""
    inputs, targets = case.batch(device)
    return pipe.profile(inputs, target=targets, repeat=repeat)


def searched(case: Case, profiles: Mapping[str, graphpp.Profile]) -> graphpp.Schedule:
    """The schedule that the search finds for the costs of two stages a rank."""
    costs = next((each.costs for each in profiles.values() if len(each.costs.stages) == 2 * RANKS), None)
    if costs is None:
        raise SystemExit(f"--schedules searched needs one beside it with two stages a rank, like {BASE}, for the costs")
    return graphpp.schedule_auto(costs, ranks=RANKS, microbatches=case.microbatches)


def others(option: argparse.Namespace) -> list[str]:
    """The schedules that torch's runtime runs too."""
    return [] if option.no_torch else [name for name in option.schedules if name in TORCH]


def timed(steps: Mapping[str, Step], case: Case, rounds: int, device: torch.device) -> dict[str, list[Sample]]:
    """Samples of the steps, whose losses are checked to agree first."""
    check_losses(plain_step(case, device), steps, device)
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(contenders, 1, device)
    return alternate(contenders, rounds, device)


def of_simulated(found: Mapping[str, Any], base: Mapping[str, Any] | None) -> float | None:
    """The measured share of the simulated gain over the base; None where the simulator foretells no gain."""
    if base is None or base["simulated"] < (1 + GAIN) * found["simulated"]:
        return None
    share: float = (found["base"] - 1) / (base["simulated"] / found["simulated"] - 1)
    return share


def record(name: str, pipe: graphpp.Pipeline, profile: graphpp.Profile, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """One schedule's figures."""
    timeline, ranks = profile.timeline, range(RANKS)
    simulated = graphpp.simulate(timeline.schedule, profile.costs)
    peaks = graphpp.schedules.peak_bytes(timeline.schedule, profile.costs)
    return {
        "samples": [asdict(sample) for sample in samples[name]],
        "base": median_ratio(samples[BASE], samples[name]) if BASE in samples else None,
        "torch": median_ratio(samples[f"torch {name}"], samples[name]) if f"torch {name}" in samples else None,
        "bubble": sum(map(timeline.bubble, ranks)) / RANKS,
        "simulated bubble": sum(map(simulated.bubble, ranks)) / RANKS,
        "profiled": timeline.makespan,
        "simulated": simulated.makespan,
        "peak": max(peaks),
    }


def table(case: Case, backend: str, records: Mapping[str, Mapping[str, Any]], device: torch.device) -> Table:
    """One line a schedule."""
    size = case.workload.size
    title = f"{case.workload.name}, {backend}, {RANKS} ranks, {device.type}, d={size.dim}, {size.layers} layers, "
    shown = Table(title=title + f"{case.microbatches} microbatches", title_justify="left")
    ratios, bubbles, steps = (f"{BASE}/it", "torch/it"), ("bubble", "simulated"), ("step profiled", "simulated", "off by")
    for column in ("schedule", "step ms", *ratios, "of what is simulated", *bubbles, *steps, "peak MiB"):
        shown.add_column(column, justify="right")
    for name, row in records.items():
        middle, share = medians(Sample(**sample) for sample in row["samples"]), row["of simulated"]
        shown.add_row(
            name,
            f"{1e3 * middle.seconds:.0f}",
            *("" if row[key] is None else f"{row[key]:.2f}" for key in ("base", "torch")),
            "" if share is None else f"{100 * share:.0f} %",
            *(f"{100 * row[key]:.0f} %" for key in ("bubble", "simulated bubble")),
            *(f"{1e3 * row[key]:.0f}" for key in ("profiled", "simulated")),
            f"{100 * (row['simulated'] / row['profiled'] - 1):+.0f} %",
            f"{row['peak'] / 2**20:.1f}",
        )
    return shown


if __name__ == "__main__":
    main()
