"""Compare a step of graphpp with the same step of torch.distributed.pipelining, and with the limit.

    torchrun --nproc-per-node 2 benchmarks/step_time.py [--models llama gpt2 moe vit] [--dims 256] [--backends inductor]

Contenders run the same model, weights, microbatches and schedule, in turn (contenders.py, workloads.py):

    graphpp     once for each of --backends
    torch       torch's runtime, eager
    compiled    torch's runtime, the module of each stage under torch.compile (schedules with whole backwards)
    plain       one eager process (rank 0; the others wait)
    limit       one process under torch.compile

Before timing, the losses must agree, to 1e-5 of their size, compiled ones to 1e-4. With dropout the same contenders
must agree without it first, and then on average. Medians over rounds; a ratio is the median of the rounds' ratios.

bound: the speed-up over one process that the bubble leaves, ranks x (1 - bubble) for equal stages and messages
that take no time. "of the limit": the time of the limit's process / bound / graphpp's time.

A record (--json) has the samples of every contender of a case by name; its ratios, by backend, are those of the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    BACKENDS,
    COMPILED,
    TORCH,
    Case,
    Step,
    check_losses,
    check_on_average,
    pipeline,
    pipeline_step,
    plain_step,
    torch_step,
)
from harness import RANK, RANKS, Contender, alternate, start
from rich.console import Console
from step_table import means, ratios, table
from workloads import NAMES, Size, add_sizes, workload

OTHERS = ("torch", "compiled", "plain", "limit")


def main() -> None:
    option = options()
    device = start()
    records = []
    for case in cases(option):
        records.append(record(case, option, device))
        if RANK == 0:
            print(f"{len(records)}: {records[-1]['model']} {records[-1]['schedule']} is done", flush=True)
    if RANK == 0:
        Console(width=200).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps({"records": records, "means": means(records)}, indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama"], choices=NAMES)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"], choices=list(TORCH))
    parser.add_argument("--backends", nargs="+", default=["eager"], choices=BACKENDS)
    parser.add_argument("--others", nargs="*", default=["torch", "plain"], choices=OTHERS, help="contenders besides graphpp")
    add_sizes(parser)
    parser.add_argument("--dropout", type=float, default=0.1, help="of gpt2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def cases(option: argparse.Namespace) -> Iterable[Case]:
    for name, dim, schedule in product(option.models, option.dims, option.schedules):
        size = Size(dim, option.layers, option.length, option.dropout)
        yield Case(workload(name, size), schedule, option.microbatches, option.rows)


def record(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time all contenders in turn."""
    timed = alternating(case, option, device)
    alternate(timed, 2, device)
    samples = alternate(timed, option.rounds, device)
    size = case.workload.size
    return {
        "model": case.workload.name,
        "dim": size.dim,
        "layers": size.layers,
        "schedule": case.schedule,
        "ranks": RANKS,
        "microbatches": case.microbatches,
        "tokens": case.rows * size.length,
        "device": device.type,
        "backends": option.backends,
        "bound": case.bound,
        "ratios": {backend: ratios(samples, f"graphpp {backend}", case.bound) for backend in option.backends},
        "samples": {name: [asdict(sample) for sample in taken] for name, taken in samples.items()},
    }


def alternating(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Contender]:
    """The contenders, after a check that their losses agree."""
    if case.workload.draws:
        calm = case.without_dropout()
        check_losses(plain_step(calm, device), everyone(calm, option, device), device)
    steps = everyone(case, option, device)
    check = check_on_average if case.workload.draws else check_losses
    check(plain_step(case, device), steps, device)
    alone = ("plain", "limit")
    return {name: Contender(step.losses, step.forget_gradients, name not in alone) for name, step in steps.items()}


def everyone(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Step]:
    """The contenders that were asked for and can run this schedule.

    torch.compile is reset first: it keeps a few variants of a module's forward, and raises where there are more.
    """
    torch.compiler.reset()
    steps = {
        f"graphpp {backend}": pipeline_step(pipeline(case, device, backend), case, device, backend)
        for backend in option.backends
    }
    others = {
        "torch": lambda: torch_step(case, device),
        "compiled": lambda: torch_step(case, device, compiled=True),
        "plain": lambda: plain_step(case, device),
        "limit": lambda: plain_step(case, device, compiled=True),
    }
    able = [name for name in option.others if name != "compiled" or case.schedule in COMPILED]
    return steps | {name: others[name]() for name in able}


if __name__ == "__main__":
    main()
