"""Time the first step of a pipeline by its number of microbatches, in CPU seconds.

    python benchmarks/first_step.py                          one process, 2 stages, 128 to 2,048 microbatches
    python benchmarks/first_step.py --rank-of 64 128 512     what one of 64 ranks decides before its first step

The first step captures the model, checks the table, chooses the stage programs of each microbatch, and binds every action. All
but the capture is linear in the actions of the table, so a first step without the capture costs a small multiple of a later
one. `--rank-of RANKS STAGES MICROBATCHES` needs no other process: rank 0 lowers a call and makes its runner.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import graphpp
from graphpp.batch.microbatch import flatten_microbatch
from graphpp.compiler.build import lowered
from graphpp.compiler.capture_once import capture_graph
from graphpp.compiler.compile_graph import compile_graph
from graphpp.compiler.request import CompileRequest
from graphpp.options.options import Options
from graphpp.planner.tables import Tables
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.runner import GraphPPRunner
from graphpp.verification.subject import SimulatedPlace

T = TypeVar("T")

WIDTH = 16
CHOICES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1F1B"},
    "1F1B, recompute": {"schedule": "1F1B", "memory": "full"},
    "GPipe, offload, cap": {"schedule": "GPipe", "memory": graphpp.Memory(offload=True, cap=1 << 40)},
}


def main() -> None:
    option = options()
    torch.set_num_threads(1)
    if option.rank_of:
        lower_one_rank(*option.rank_of)
        return
    print(f"{'':<22}{'microbatches':>14}{'compile':>10}{'first step':>12}{'later step':>12}{'ratio':>8}")
    for name, choice in CHOICES.items():
        for microbatches in option.microbatches:
            measure(name, choice, microbatches)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rank-of", type=int, nargs=3, metavar=("RANKS", "STAGES", "MICROBATCHES"))
    return parser.parse_args()


def model_of(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of some work, and its CPU seconds."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def measure(name: str, choice: dict[str, Any], microbatches: int) -> None:
    """One row: compile on an example, the first step, and the faster of two later steps."""
    x = torch.randn(microbatches, WIDTH)
    example = graphpp.Microbatch((x[:1],), {}, x[:1])
    model, loss = model_of(4), nn.functional.mse_loss
    pipe, compiling = timed(
        lambda: graphpp.compile(model, loss, split=2, microbatches=microbatches, example=example, **choice)
    )
    steps = [timed(lambda: pipe.step(x, target=x))[1] for _ in range(3)]
    first, later = steps[0], min(steps[1:])
    print(f"{name:<22}{microbatches:>14,}{compiling:>10.2f}{first:>12.2f}{later:>12.2f}{first / later:>8.1f}", flush=True)


def lower_one_rank(ranks: int, stages: int, microbatches: int) -> None:
    """The parts of a first step of rank 0, each in CPU seconds."""
    place = SimulatedPlace(torch.device("cpu"), None, count=ranks)
    model = model_of(stages)
    request = CompileRequest(model, nn.functional.mse_loss, Options(split=stages, schedule="Interleaved1F1B"), place)
    tables = Tables(request.options.schedule, ranks)
    x = torch.zeros(1, WIDTH)
    example = flatten_microbatch(graphpp.Microbatch((x,), {}, x))

    def show(part: str, work: Callable[[], T]) -> T:
        result, seconds = timed(work)
        print(f"{part:<40}{seconds:>8.2f} s", flush=True)
        return result

    table = show("make and check the table", lambda: tables.checked(stages, microbatches, True))
    show("add sends and receives", lambda: table.running)
    captured = show("capture", lambda: capture_graph(request, example, True))
    graph = show("lower the stages", lambda: compile_graph(request, captured, lambda _: table, None))
    made = show("lower the call", lambda: lowered(request, [graph] * microbatches, table, None))
    show("facts that ranks compare", lambda: made.facts.digest)
    show("runner", lambda: GraphPPRunner(made.programs, made.schedule, ModelState(model), place))


if __name__ == "__main__":
    main()
