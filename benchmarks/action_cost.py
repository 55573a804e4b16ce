"""Time one action of a schedule when there is nothing to compute.

    python benchmarks/action_cost.py                                  one process, 4 local stages: no messages
    torchrun --nproc-per-node 2 benchmarks/action_cost.py             2 stages a rank: with messages of 4 bytes

Interleaved 1F1B, microseconds per action (medians of steps in turn, divided by the actions of the rank with most), of

    loop             graphpp's loop over the same table with actions that do nothing: the lower bound in one process
    messages         the table's sends and receives alone, each waited for where its value is read: the lower bound on 2 ranks
    empty            graphpp's runner with stage programs that return their inputs; the target is about this contender
    torch, empty     torch's `_PipelineScheduleRuntime` over the same table with stub stages: no module, no autograd
    one op           the pipeline that graphpp compiles from stages `x * weight`, whole `pipe.step`
    torch, one op    torch's ScheduleInterleaved1F1B over the same modules, whole `step`

`--profile` prints rank 0's cProfile of each contender, by own time per action.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from empty_stages import STAGES, empty_program, messages, torch_loop
from harness import RANK, RANKS, Contender, alternate, medians, start
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import graphpp
from graphpp.parallel.rank_place import RankPlace
from graphpp.parallel.transport import connect
from graphpp.runtime.action_loop import ActionLoop
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.generate import names as schedules
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.schedule import Schedule

Step = Callable[[], object]


def main() -> None:
    option = options()
    device = start()
    if RANKS == 1:  # torch's stages need a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = add_send_recv(schedules.interleaved_1f1b(RANKS, STAGES, option.microbatches))
    actions = max(len(list(filter(None, row))) for row in table.table)
    steps = contenders(table, device)
    results = alternate({name: Contender(step) for name, step in steps.items()}, option.rounds + 3, device)
    micros = {name: 1e6 * medians(samples[3:]).seconds / actions for name, samples in results.items()}
    cpu = {name: 1e6 * medians(samples[3:]).cpu / actions / RANKS for name, samples in results.items()}
    if option.profile:
        for name, step in steps.items():
            show_profile(name, step, actions)
    if RANK == 0:
        Console(width=150).print(shown(micros, cpu, actions))
        if option.json:
            Path(option.json).write_text(json.dumps({"ranks": RANKS, "actions": actions, "us": micros, "cpu_us": cpu}))
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def contenders(table: Schedule, device: torch.device) -> dict[str, Step]:
    """The contenders, in the order of the head of this file."""
    connect(dist.group.WORLD)
    runner = GraphPPRunner(empty_program(), table, ModelState(nn.Module()), RankPlace(device, dist.group.WORLD))
    inputs = [{"args[0]": torch.ones(1, device=device)}] * table.microbatches
    seeds = [torch.ones((), device=device)] * table.microbatches
    row = [(action, idle) for action in table.table[RANK] if action is not None]
    loop = ActionLoop(list(runner.stages.values()), table, row)
    return {
        "loop": loop.run,
        "messages": messages(table),
        "empty": lambda: runner.step(inputs, seeds),
        "torch, empty": torch_loop(table),
        "one op": compiled_step(table.microbatches, device),
        "torch, one op": torch_step(table.microbatches, device),
    }


# ---------------------------------------------------------------------------------------------------- one operation


class Scale(nn.Module):
    """`x * weight`, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def compiled_step(microbatches: int, device: torch.device) -> Step:
    model = nn.Sequential(*(Scale() for _ in range(STAGES)))
    x = torch.ones(microbatches, 1, device=device)
    pipe = graphpp.compile(
        model,
        loss,
        example=graphpp.Microbatch((x[:1],), target=x[:1]),
        split=[str(stage) for stage in range(1, STAGES)],
        schedule="Interleaved1F1B",
        microbatches=microbatches,
        parallel=graphpp.Parallel(device=device),
    )
    return lambda: pipe.step(x, target=x)


def torch_step(microbatches: int, device: torch.device) -> Step:
    x = torch.ones(microbatches, 1, device=device)
    into, out = x[:1].clone(), x[:1].clone().requires_grad_()
    stages = [
        PipelineStage(
            Scale().to(device), index, STAGES, device, input_args=(into.requires_grad_(index > 0),), output_args=(out,)
        )
        for index in range(RANK, STAGES, RANKS)
    ]
    schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss)
    args = (x,) if RANK == 0 else ()

    def step() -> None:
        given = {"target": x, "losses": []} if RANK == RANKS - 1 else {}
        schedule.step(*args, return_outputs=False, **given)

    return step


def idle() -> None:
    """An action that does nothing."""


# ------------------------------------------------------------------------------------------------------------ results


def shown(micros: dict[str, float], cpu: dict[str, float], actions: int) -> Table:
    table = Table(title=f"{RANKS} ranks, {actions} actions a rank: µs per action", title_justify="left")
    for column in ("contender", "µs", "cpu µs", "of torch, empty", "of torch, one op"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, value in micros.items():
        ratios = (f"{value / micros[torchs]:.2f}" for torchs in ("torch, empty", "torch, one op"))
        table.add_row(name, f"{value:.1f}", f"{cpu[name]:.1f}", *ratios)
    return table


def show_profile(name: str, step: Step, actions: int, repeats: int = 20) -> None:
    """The functions with most time of their own, µs per action."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeats):
        step()
    profiler.disable()
    if RANK:
        return
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:22]  # type: ignore[attr-defined]
    print(f"--- {name}: own µs per action, calls per action")
    for (file, line, function), (_, calls, own, _, _) in rows:
        per_action = 1e6 * own / actions / repeats
        print(f"{per_action:8.2f} {calls / actions / repeats:6.2f}  {Path(file).name}:{line} {function}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*barrier.*")
    main()
