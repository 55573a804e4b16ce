"""On one GPU, compare a step of graphpp with CUDA graphs to the same step without.

    python benchmarks/cuda_graphs.py                            32 layers of width 256, whose kernels are small
    python benchmarks/cuda_graphs.py --models small large       and a 370 M-parameter Llama in bfloat16
    python benchmarks/cuda_graphs.py --tiny --backends eager    the same code at tiny sizes, also on a CPU, without graphs

One process with 4 local stages under Interleaved1F1B; for each backend three pipelines with equal weights and batches in turn:

    plain     no graph
    step      the whole step as one graph
    tasks     one graph for each stage, phase and microbatch, as where messages go to other ranks

A step is forward and backward of all microbatches into fresh `param.grad`; no optimizer. Losses and gradients of the graphs
are compared with those of plain. "times as fast": plain over it, the median of the rounds' ratios. MiB: the most that a
step takes above the bytes before it; the graphs' own memory is allocated before, and does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_step import Case, Step, graphpp_step, peak_bytes
from harness import Contender, Sample, alternate, median_ratio, medians, start, synchronize
from models import Config
from rich.console import Console
from rich.table import Table

import graphpp
from tests.internals import recording_tasks
from tests.training import capturing_once

BACKENDS = {"eager": graphpp.Eager, "inductor": graphpp.Inductor}
CASES = {
    "small": Case(Config(256, 32, heads=4), torch.float32, microbatches=8, rows=1, length=128),
    "large": Case(Config(1024, 24, heads=16, vocab=32768), torch.bfloat16, microbatches=8, rows=4, length=1024),
    "tiny": Case(Config(32, 4, heads=2), torch.float32, microbatches=2, rows=1, length=8),
}


@dataclass
class Result:
    """The samples of one contender, its bytes, and how many of its programs are in each state."""

    samples: list[Sample]
    peak: int | None
    states: dict[str, int]


def main() -> None:
    option = options()
    device = start()
    records: list[dict[str, Any]] = []
    captures: dict[Any, Any] = {}
    for name in ["tiny"] if option.tiny else option.models:
        for backend in option.backends:
            with capturing_once(captures):
                found = measured(CASES[name], backend, option, device)
            Console(width=130).print(table(f"{name}, {backend}, torch {torch.__version__}", CASES[name], found))
            records.append({"model": name, "backend": backend, "results": {key: asdict(one) for key, one in found.items()}})
    if option.json:
        Path(option.json).write_text(json.dumps(records, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["small"], choices=["small", "large"])
    parser.add_argument("--backends", nargs="+", default=[*BACKENDS], choices=[*BACKENDS])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def measured(case: Case, backend: str, option: argparse.Namespace, device: torch.device) -> dict[str, Result]:
    """Check that numbers agree, then time the three pipelines in turn."""
    steps: dict[str, Step] = {}
    for name in ("plain", "step", "tasks"):
        began = time.perf_counter()
        made = BACKENDS[backend](cudagraphs=name != "plain")
        steps[name] = graphpp_step(case, device, schedule="Interleaved1F1B", backend=made)
        if name == "tasks":
            steps[name].losses = recording_tasks()(steps[name].losses)
        for _ in range(3):  # warm-up, recording, replay
            steps[name].forget_gradients()
            steps[name].losses()
        synchronize(device)
        print(f"{name}: {time.perf_counter() - began:.1f} s for three steps", flush=True)
    check(steps)
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(contenders, 2, device)
    samples = alternate(contenders, option.rounds, device)
    return {name: Result(samples[name], peak_bytes(step, device), states(step)) for name, step in steps.items()}


def states(step: Step) -> dict[str, int]:
    assert step.pipe is not None
    return dict(Counter(step.pipe.cudagraphs.values()))


def check(steps: dict[str, Step]) -> None:
    """Print how losses and gradients differ from those without graphs; raises SystemExit where they are not close."""
    found: dict[str, list[Any]] = {}
    for name, step in steps.items():
        step.forget_gradients()
        losses = step.losses()
        found[name] = [losses, *(parameter.grad for parameter in step.parameters)]
    for name, values in found.items():
        wrong = [pair for pair in zip(values, found["plain"], strict=True) if not torch.equal(*pair)]
        worst = max([0.0, *(float((one - other).float().norm() / other.float().norm()) for one, other in wrong)])
        print(f"{name}: {len(wrong)} of {len(values)} losses and gradients differ, by at most {worst:.1e} of their norm")
        if not worst < 1e-2:
            raise SystemExit(1)


def table(title: str, case: Case, found: dict[str, Result]) -> Table:
    config = case.config
    title += f": {config.layers} layers of width {config.dim}, {case.microbatches} microbatches of {case.rows} x {case.length}"
    shown = Table(title=title, title_justify="left")
    for column in ("", "ms", "cpu ms", "times as fast", "least", "MiB", "programs"):
        shown.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        middle, plain = medians(one.samples), found["plain"].samples
        least = min(plain[at].seconds / each.seconds for at, each in enumerate(one.samples))
        memory = "-" if one.peak is None else f"{one.peak / 2**20:.0f}"
        programs = ", ".join(f"{count} {state}" for state, count in one.states.items())
        ratio = median_ratio(plain, one.samples)
        shown.add_row(
            name, f"{1e3 * middle.seconds:.2f}", f"{1e3 * middle.cpu:.2f}", f"{ratio:.3f}", f"{least:.3f}", memory, programs
        )
    return shown


if __name__ == "__main__":
    main()
