"""Time from `compile` to the first step: is each distinct layer compiled once, and does a second start find the compiled code?

    python benchmarks/compile_time.py [--layers 8 64] [--ranks 1] [--model llama] [--dim 64] [--torch]

For each number of layers, with new folders for the caches, a process (with --ranks: torchrun's processes) compiles the
model with the backend and runs a step; then a second process does the same with the folders as the first left them. Before
the first process, torch.compile of a few operations fills the folders with results that are made once per machine
(headers, the processor's instructions): they take up to a minute and have nothing to do with layers; --bare leaves them
to the first start. The parts are seconds by the clock of the slowest rank, from the call of `graphpp.compile` on:

    capture     torch.export and the joint trace, or the look-up of the captured graph
    passes      the rest of `graphpp.compile`: cut, checks, plan
    programs    from there until the first step has its programs: the backend's compilations
    first step  the rest of the first step

"compiled": programs and first step, less a second step, which only runs. Targets: "compiled" of 64 layers takes at most 1.2
times that of 8; a whole second start takes at most 0.2 of the first. Importing torch is not counted.

`--torch`: the same figures for one process with model and loss under torch.compile, uncut.
The caches are in the folders that GRAPHPP_CACHE and TORCHINDUCTOR_CACHE_DIR name, and are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import BACKENDS, Case, losses_of, pipeline, pipeline_step, plain_step
from harness import RANK, RANKS, over_ranks, start
from rich.console import Console
from rich.table import Table
from stopwatch import Stopwatch, listen
from torch import Tensor
from workloads import NAMES, Size, workload

ARTIFACT = "COMPILE_TIME_ARTIFACT"  # the variable that names the folder of captured graphs
CACHES = {ARTIFACT: "graphs", "GRAPHPP_CACHE": "graphpp", "TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
Record = dict[str, Any]


def main() -> None:
    option = options()
    if option.one is not None:
        measure(option)
        return
    kinds = ["graphpp", "torch"] if option.torch else ["graphpp"]
    records = [record for kind in kinds for layers in option.layers for record in starts(kind, layers, option)]
    Console(width=160).print(table(records, option))
    if option.json:
        Path(option.json).write_text(json.dumps(records, indent=1))


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--model", default="llama", choices=NAMES)
    parser.add_argument("--backend", default="inductor", choices=BACKENDS)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--torch", action="store_true", help="torch.compile of the uncut model too")
    parser.add_argument("--bare", action="store_true", help="start with empty folders")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--one", choices=["graphpp", "torch", "prepare"], help=argparse.SUPPRESS)
    return parser.parse_args(given)


# ----------------------------------------------------------------------------------------------------------- processes


def starts(kind: str, layers: int, option: argparse.Namespace) -> list[Record]:
    """The records of a first and a second start."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / part) for name, part in CACHES.items()}
        if option.backend != "eager" and not option.bare:
            in_own_process("prepare", layers, option, caches)
        first, second = (in_own_process(kind, layers, option, caches) for _ in range(2))
    if abs(first["loss"] / second["loss"] - 1) > 1e-6:
        raise SystemExit(f"{layers} layers: the first start had loss {first['loss']}, the second {second['loss']}")
    return [first | {"start": "first"}, second | {"start": "second"}]


def in_own_process(kind: str, layers: int, option: argparse.Namespace, caches: dict[str, str]) -> Record:
    """The record of one start."""
    several = kind == "graphpp" and option.ranks > 1
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(option.ranks)]
    command = [sys.executable, *(torchrun if several else []), __file__, "--one", kind, "--layers", str(layers)]
    passed = ("schedule", "model", "backend", "dim", "rows", "length", "microbatches")
    command += [text for name in passed for text in (f"--{name}", str(getattr(option, name)))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | caches)
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def measure(option: argparse.Namespace) -> None:
    """In a process of its own: compile, run two steps, print the record as the last line."""
    device = start()
    if option.one == "prepare":
        print(json.dumps({"loss": prepare(device)}))
        return
    size = Size(option.dim, option.layers[0], option.length, dropout=0.0)
    case = Case(workload(option.model, size), option.schedule, option.microbatches, option.rows)
    watch = Stopwatch()
    listen(watch)
    if option.one == "graphpp":
        pipe = pipeline(case, device, option.backend, artifact=os.environ[ARTIFACT])
        watch.note("passes")
        step = pipeline_step(pipe, case, device, option.backend)
    else:
        step = plain_step(case, device, compiled=True)
        watch.start()
    losses = losses_of(step, device)
    watch.note("first step")
    losses_of(step, device)
    watch.note("second step")
    slowest = map(max, zip(*over_ranks([*watch.parts.values()]), strict=True))
    parts = dict(zip(watch.parts, slowest, strict=True))
    if dist.is_initialized():
        dist.destroy_process_group()
    if RANK == 0:
        loss = float("nan") if losses is None else losses.mean().item()
        print(json.dumps({"kind": option.one, "ranks": RANKS, "layers": option.layers[0], "loss": loss, "parts": parts}))


def prepare(device: torch.device) -> float:
    """Have Inductor compile something, and run it."""
    x = torch.ones(64, 64, device=device, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, -1).square().sum()

    value: Tensor = torch.compile(run)(x)
    value.backward()
    return value.item()


# ------------------------------------------------------------------------------------------------------------- results


def compiled(record: Record) -> float:
    """Seconds in which the backend compiled."""
    parts = record["parts"]
    return float(parts.get("programs", 0.0) + parts["first step"] - parts["second step"])


def total(record: Record) -> float:
    """Seconds from the call of `compile` to the end of the first step."""
    return float(sum(record["parts"].values()) - record["parts"]["second step"])


def table(records: list[Record], option: argparse.Namespace) -> Table:
    """One line per start; ratios to the first start, and to the first start of the fewest layers."""
    title = f"{option.model}, d={option.dim}, {option.backend}, schedule {option.schedule}, {option.ranks} ranks: seconds"
    shown = Table(title=title, title_justify="left")
    names = ("capture", "passes", "programs", "first step", "second step")
    for column in ("contender", "layers", "start", *names, "compiled", "of fewest layers", "total", "of first start"):
        shown.add_column(column, justify="right")
    for record in records:
        before = [each for each in records if each["kind"] == record["kind"] and each["start"] == "first"]
        same = next(each for each in before if each["layers"] == record["layers"])
        fewest = min(before, key=lambda each: each["layers"])
        is_first = record["start"] == "first"
        shown.add_row(
            record["kind"],
            str(record["layers"]),
            record["start"],
            *(f"{record['parts'][name]:.2f}" if name in record["parts"] else "" for name in names),
            f"{compiled(record):.2f}",
            f"{compiled(record) / compiled(fewest):.2f}" if is_first else "",
            f"{total(record):.2f}",
            "" if is_first else f"{100 * total(record) / total(same):.0f} %",
        )
    return shown


if __name__ == "__main__":
    main()
