"""Compare steps of DualPipeV under the most balanced cut and under moved stages, on ranks that sleep, with simulated steps.

    torchrun --nproc-per-node 8 benchmarks/woven_cuts.py [--ms 20] [--exchange 0.9] [--dense 8] [--layers 38]

The layers sleep (sleeping_stages.py). Those after the first --dense ones exchange values in the middle of their forward, and of
the gradients of their input: the exchange takes --exchange of the layer's forward, and sleeps beside whatever its rank computes
until the wait, as an all-to-all on a network would. So weaving can hide all of it, and a cut by seconds alone, which counts the
exchanges, gives early ranks too many layers.

    balanced   the cut with the lightest heaviest stage, by the seconds of computation and exchanges
    moved      the cut that `CutSearch` moves to from there, under the time of each pair

Losses of both must be equal. A sample is --steps steps in a row, divided by their number; "over" is the median sample over the
simulated makespan, minus 1. Messages take no time in the simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from contenders import Case, check_losses, pipeline_step
from harness import RANK, RANKS, Contender, alternate, start
from rich.console import Console
from rich.table import Table
from sleeping import in_a_row, per_step
from sleeping_stages import Sleepers, batch, loss, part
from torch import Tensor, nn
from workloads import Size, Workload

import graphpp
from graphpp.planner.auto_split import CutSearch
from graphpp.planner.balance import balanced
from graphpp.planner.segments import Cut, Segments
from graphpp.schedules.simulate.step_time import StepTimes
from graphpp.schedules.table.actions import Kind

GROUP = "sleeping"  # the name, on every rank, of a group of this rank alone


class _Exchange(dist.Work):
    """Done at a time of `time.perf_counter`."""

    kept: ClassVar[set[_Exchange]] = set()  # torch's registry keeps only the C++ half of the object alive
    line = 0.0  # when the link is free

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.due = _Exchange.line = max(time.perf_counter(), _Exchange.line) + seconds
        self.kept.add(self)

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(max(0.0, self.due - time.perf_counter()))
        self.kept.discard(self)
        return True


def exchange(x: Tensor, seconds: float, group_name: str) -> Tensor:
    """The values of `x`, there `seconds` later: wait before reading them."""
    result = x.clone()
    torch._C._distributed_c10d._register_work(result, _Exchange(seconds))
    return result


def waited(x: Tensor, seconds: float, group_name: str) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(torch.ops.sleeping.exchange(x, seconds, group_name))
    return result


def register() -> None:
    torch.library.define("sleeping::exchange", torch.library.infer_schema(exchange, mutates_args=()))
    torch.library.impl("sleeping::exchange", "CPU", exchange)
    torch.library.register_fake("sleeping::exchange", lambda x, seconds, group_name: torch.empty_like(x))
    torch.library.register_autograd(
        "sleeping::exchange",
        lambda ctx, gradient: (waited(gradient, *ctx.given), None, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "given", inputs[1:]),
    )
    own = [dist.new_group([rank]) for rank in range(RANKS)][RANK]
    torch._C._distributed_c10d._register_process_group(GROUP, own)


class Layer(nn.Module):
    """Half of the computation, the exchange if there is one, the other half; F, I and W compute `seconds` each."""

    def __init__(self, numbers: int, seconds: float, exchanged: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(numbers) + 0.5 for _ in range(2))
        self.seconds, self.exchanged = seconds / 2, exchanged

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.sleeping.forward(x, self.weights[0], *3 * (self.seconds,))
        if self.exchanged:
            x = waited(x, self.exchanged, GROUP)
        result: Tensor = torch.ops.sleeping.forward(x, self.weights[1], *3 * (self.seconds,))
        return result


def exchanges(option: argparse.Namespace) -> list[float]:
    """By layer, the seconds of an exchange."""
    return [option.exchange * option.ms / 1e3 * (layer >= option.dense) for layer in range(option.layers)]


def workload(option: argparse.Namespace) -> Workload:
    def model(size: Size) -> nn.Module:
        return Sleepers([Layer(size.dim, option.ms / 1e3, each) for each in exchanges(option)])

    return Workload("woven", Size(dim=64, layers=option.layers), model, part, loss, batch)


def segments(option: argparse.Namespace) -> Segments:
    """The exact costs of the layers; the first one has no input gradients but those of its second half's input."""
    own, each = option.ms / 1e3, []
    for layer, sent in enumerate(exchanges(option)):
        computed = own / 2 if layer == 0 else own
        times = {"forward": own + sent, "input_grad": computed + sent, "weight_grad": own}
        each.append(graphpp.StageCosts(**times, exchanged={Kind.F: sent, Kind.I: sent}))
    return Segments(tuple(range(option.layers)), graphpp.Costs(tuple(each), hidden=1.0))


def cost(node: torch.fx.Node) -> float:
    """Seconds of an operation: those that it sleeps."""
    known = str(node.target).startswith("sleeping.")
    return float(next(each for each in node.args if isinstance(each, float))) if known else 0.0


def cuts(option: argparse.Namespace, table: graphpp.Schedule) -> dict[str, Cut]:
    """The cuts that rank 0 finds, on every rank."""
    known, times = segments(option), StepTimes(table)
    first = balanced([each.forward + each.of(Kind.B) for each in known.costs.stages], table.stages)
    search = CutSearch(known, table, lambda state: [], priced=lambda cut: (0, simulated(known, times, cut), 0), most=4000)
    found: list[Any] = [search.moved(first) if RANK == 0 else None]
    if RANKS > 1:
        dist.broadcast_object_list(found)
    return {"balanced": first, "moved": found[0]}


def simulated(known: Segments, times: StepTimes, cut: Cut) -> float:
    return times.seconds(known.stages(cut)[0]).makespan


def in_real_time() -> None:
    """Let the threads of this process preempt all other work of the machine: they sleep for nearly all of a step."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    option = options()
    device = start()
    register()
    case = Case(workload(option), "DualPipeV", option.times * RANKS, 1)
    found = cuts(option, case.table)
    parallel = graphpp.Parallel(device=device, op_costs=cost)
    steps = {}
    for name, cut in found.items():
        inputs, targets = case.workload.batch(case.rows)
        pipe = graphpp.compile(
            case.workload.model(), loss, example=graphpp.Microbatch((inputs,), target=targets), schedule="DualPipeV",
            split=[f"layers.{first}" for first in cut[1:]], microbatches=case.microbatches, parallel=parallel,
        )  # fmt: skip
        steps[name] = pipeline_step(pipe, case, device)
    check_losses(steps["balanced"], steps, device)
    if option.real_time:
        in_real_time()
    runs = {name: Contender(in_a_row(step, option.steps)) for name, step in steps.items()}
    taken = alternate(runs, option.rounds, device)
    if RANK == 0:
        seconds = {name: [per_step(each, option.steps).seconds for each in own] for name, own in taken.items()}
        report(option, case, found, seconds)
    dist.destroy_process_group()


def report(option: argparse.Namespace, case: Case, found: dict[str, Cut], seconds: dict[str, list[float]]) -> None:
    table = Table(title=f"{RANKS} ranks, {case.stages} stages, {case.microbatches} microbatches", title_justify="left")
    for column in ("cut", "layers of each stage", "simulated s", "measured s", "over"):
        table.add_column(column)
    for name, cut in found.items():
        sizes = [end - first for first, end in zip(cut, (*cut[1:], option.layers), strict=True)]
        expected, own = simulated(segments(option), StepTimes(case.table), cut), sorted(seconds[name])[len(seconds[name]) // 2]
        table.add_row(name, " ".join(map(str, sizes)), f"{expected:.3f}", f"{own:.3f}", f"{own / expected - 1:.1%}")
    Console(width=140).print(table)
    if option.json:
        Path(option.json).write_text(json.dumps({"options": vars(option), "cuts": found, "seconds": seconds}, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, default=20.0, help="of F, of I and of W of a layer")
    parser.add_argument("--exchange", type=float, default=0.9, help="seconds of an exchange for each second of a forward")
    parser.add_argument("--dense", type=int, default=8, help="first layers, without exchange")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--times", type=int, default=2, help="microbatches for each rank")
    parser.add_argument("--steps", type=int, default=2, help="in a row, for one sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real-time", action="store_true", help="preempt other work of the machine; needs the right to")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


if __name__ == "__main__":
    main()
