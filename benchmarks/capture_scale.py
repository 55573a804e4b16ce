"""Time and memory to capture a model of hundreds of billions of parameters and cut it into 16 stages.

    python benchmarks/capture_scale.py [--model llama] [--layers 16 32 63 126] [--stages 16] [--json results.json]

Contract: `graphpp.compile` compiles every depth in a process of its own, from a model of `large_models.py`. The
parts (capture, each pass with its verification, the rest: plan, fingerprint, schedule) are CPU seconds of that call,
which is single-threaded, so other jobs on the machine count little; `wall` is by the clock. Memory is the peak
resident size of the process above its size when torch, graphpp and the meta model were loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import resident_bytes
from large_models import LARGE
from rich.console import Console
from rich.table import Table
from torch import nn

import graphpp
from graphpp.compiler import capture_once
from graphpp.compiler import compile_graph as compiler
from graphpp.passes.lower import PassResult


def main() -> None:
    option = options()
    if option.one is not None:
        print(json.dumps(measure(option)))
        return
    rows = [in_own_process(layers, option) for layers in option.layers]
    Console(width=160).print(table(rows))
    if option.json:
        Path(option.json).write_text(json.dumps(rows, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=LARGE, default="llama")
    parser.add_argument("--layers", type=int, nargs="+", help="default: a part, and all layers of the model")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens in a row")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    option = parser.parse_args()
    option.layers = option.layers or [16, LARGE[option.model].layers]
    return option


def in_own_process(layers: int, option: argparse.Namespace) -> dict[str, Any]:
    """The record of one depth, measured in a new process (so that peak memory is its own)."""
    command = [sys.executable, __file__, "--one", str(layers), "--stages", str(option.stages), "--model", option.model]
    command += ["--length", str(option.length)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def measure(option: argparse.Namespace) -> dict[str, Any]:
    """Compile once; CPU seconds by part, nodes of the joint graph, bytes of memory above the start."""
    torch.set_num_threads(1)
    large, layers = LARGE[option.model], option.one
    model = large.new(layers)
    prefix = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == layers)
    split = [f"{prefix}.{at * layers // option.stages}" for at in range(1, option.stages)]
    start, began, clock = resident_bytes(), time.perf_counter(), Clock()
    listen(clock)
    graphpp.compile(
        model,
        large.loss,
        example=large.example(option.length),
        split=split,
        schedule="1F1B",
        parallel=graphpp.Parallel(device="cpu"),
    )
    wall = time.perf_counter() - began
    clock.note("rest")
    return {
        "model": option.model,
        "layers": layers,
        "stages": option.stages,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": clock.nodes,
        "wall": wall,
        "parts": clock.parts,
        "peak_bytes": peak_bytes() - start,
    }


@dataclass
class Clock:
    """CPU seconds since the last note, by part."""

    parts: dict[str, float] = field(default_factory=dict)
    nodes: int = 0
    last: float = field(default_factory=time.process_time)

    def note(self, name: str) -> None:
        now = time.process_time()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now


def listen(clock: Clock) -> None:
    """Have `graphpp.compile` note capture and every pass, and the nodes of the joint graph."""
    capture, lower = capture_once.capture, compiler.lower

    def timed_capture(*args: Any, **kwargs: Any) -> Any:
        captured = capture(*args, **kwargs)
        clock.nodes = len(captured.joint.graph.nodes)
        clock.note("capture")
        return captured

    def heard_lower(joint: Any, starts: Any, hook: Callable[[PassResult], None], *rest: Any, **named: Any) -> Any:
        def heard(passed: PassResult) -> None:
            clock.note(passed.name)
            hook(passed)

        clock.note("rest")
        return lower(joint, starts, heard, *rest, **named)

    capture_once.capture, compiler.lower = timed_capture, heard_lower  # type: ignore[assignment]


def peak_bytes() -> int:
    """The most bytes that the process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(rows: list[dict[str, Any]]) -> Table:
    """CPU seconds by part, one line per depth."""
    names = list(rows[0]["parts"])
    title = f"capture and cut, {rows[0]['model']}, {rows[0]['stages']} stages, meta device: CPU seconds"
    shown = Table(title=title, title_justify="left")
    for column in ("layers", "parameters", "nodes", *names, "total", "per layer", "wall", "peak MiB"):
        shown.add_column(column, justify="right")
    for row in rows:
        total = sum(row["parts"].values())
        seconds = [f"{row['parts'].get(name, 0):.2f}" for name in names]
        tail = [f"{total:.2f}", f"{total / row['layers']:.3f}", f"{row['wall']:.2f}"]
        size, memory = f"{row['parameters'] / 1e9:.1f} B", f"{row['peak_bytes'] / 2**20:.0f}"
        shown.add_row(str(row["layers"]), size, str(row["nodes"]), *seconds, *tail, memory)
    return shown


if __name__ == "__main__":
    main()
