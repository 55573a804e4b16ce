"""Compare a step of a pipeline whose layers are spread over ranks: graphpp, and torch's PipelineStage after parallelize_module.

    torchrun --nproc-per-node 4 benchmarks/tensor_parallel.py [--pp 2] [--schedules 1F1B Interleaved1F1B] [--dims 256 512]

All contenders run the same Llama, weights, plan of parallelize_module, microbatches and schedule on a mesh of `pp` x `tp`:

    torch       manual stages, each after parallelize_module, torch's schedule
    eager       graphpp, bit-equal to eager
    inductor    graphpp with backend="inductor"

Losses must agree first, to 1e-4 of their size. Medians over rounds; a ratio is the median of the rounds' ratios to torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import TORCH, like, spread, stage_modules
from harness import RANK, RANKS, Contender, alternate, median_ratio, medians, start
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from workloads import Size, Workload, add_sizes, workload

import graphpp
from graphpp.schedules.generate.read import default_stages, make_table


@cache
def _mesh(pp: int) -> DeviceMesh:
    """The mesh of all contenders: torch keeps what it derives from a mesh for every equal one, with the first one's groups."""
    return init_device_mesh("cpu", (pp, RANKS // pp), mesh_dim_names=("pp", "tp"))


@dataclass(frozen=True)
class Case:
    """A model and a schedule on a mesh of `pp` x `tp` ranks."""

    workload: Workload
    schedule: str
    pp: int
    microbatches: int
    rows: int

    @property
    def stages(self) -> int:
        return default_stages(self.schedule, self.pp)

    @property
    def cuts(self) -> list[int]:
        return [stage * self.workload.size.layers // self.stages for stage in range(self.stages + 1)]

    def mesh(self) -> DeviceMesh:
        return _mesh(self.pp)


@dataclass(frozen=True)
class Contestant:
    """`run` makes a step; its losses, [microbatches], on ranks that have them; `forget` drops the gradients."""

    run: Callable[[], Tensor | None]
    forget: Callable[[], None]


def ours(case: Case, backend: str) -> Contestant:
    mesh = case.mesh()
    inputs, targets = case.workload.batch(case.rows)
    pipe = graphpp.compile(
        spread(case.workload.model(), mesh["tp"]),
        case.workload.loss,
        example=graphpp.Microbatch((inputs,), target=targets),
        split=[f"layers.{layer}" for layer in case.cuts[1:-1]],
        schedule=case.schedule,
        microbatches=case.microbatches,
        mesh=mesh,
        backend=backend,
        parallel=graphpp.Parallel(check_data=0),
    )
    inputs, targets = case.workload.batch(case.microbatches * case.rows)
    return Contestant(lambda: pipe.step(inputs, target=targets).losses, pipe.zero_grad)


def torchs(case: Case) -> Contestant:
    mesh = case.mesh()
    table = make_table(case.schedule, case.pp, case.stages, case.microbatches)
    modules, values = stage_modules(case.workload, case.cuts, case.rows)
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    stages = []
    for index in (index for index, rank in table.rank_of_stage.items() if rank == mesh["pp"].get_local_rank()):
        into, out = (like(value, cpu) for value in values[index : index + 2])
        module = spread(modules[index], mesh["tp"])
        stages.append(PipelineStage(module, index, case.stages, cpu, input_args=(into,), output_args=(out,), group=group))
    runner = TORCH[case.schedule](
        stages[0] if case.stages == case.pp else stages, case.microbatches, loss_fn=case.workload.loss
    )
    inputs, targets = case.workload.batch(case.microbatches * case.rows)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runner.step(*((inputs,) if first else ()), return_outputs=False, **given)
        return torch.stack([value.detach() for value in losses]) if last else None

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    return Contestant(step, forget)


def record(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    ways = {"torch": lambda: torchs(case), "eager": lambda: ours(case, "eager"), "inductor": lambda: ours(case, "inductor")}
    made = {name: make() for name, make in ways.items() if name not in option.without}
    check_losses(made)
    timed = {name: Contender(each.run, each.forget) for name, each in made.items()}
    alternate(timed, 2, device)
    samples = alternate(timed, option.rounds, device)
    base = next(iter(samples))
    return {
        "dim": case.workload.size.dim, "schedule": case.schedule, "pp": case.pp, "tp": RANKS // case.pp,
        "ratios": {name: median_ratio(taken, samples[base]) for name, taken in samples.items()},
        "cpu ratios": {name: median_ratio(taken, samples[base], "cpu") for name, taken in samples.items()},
        "medians": {name: asdict(medians(taken)) for name, taken in samples.items()},
    }  # fmt: skip


def check_losses(contestants: dict[str, Contestant]) -> None:
    found = {name: contestant.run() for name, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.forget()
    here = {name: losses for name, losses in found.items() if losses is not None}
    for name, losses in here.items() if "torch" in here else ():
        if not torch.allclose(losses, here["torch"], rtol=1e-4, atol=0):
            raise SystemExit(f"{name}: losses {losses.tolist()}, of torch {here['torch'].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[256])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"], choices=list(TORCH))
    parser.add_argument("--pp", type=int, default=2, help="ranks of a pipeline; the others share its layers")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the records")
    option = parser.parse_args()
    device, records = start(), []
    for dim, schedule in product(option.dims, option.schedules):
        chosen = workload("llama", Size(dim, option.layers, option.length, 0.0))
        case = Case(chosen, schedule, option.pp, option.microbatches, option.rows)
        records.append(record(case, option, device))
    if RANK == 0:
        Console(width=200).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> Table:
    found = Table("d", "schedule", "pp x tp", "contender", "s", "ratio", "CPU ratio")
    for each in records:
        for name, ratio in each["ratios"].items():
            found.add_row(
                str(each["dim"]), each["schedule"], f"{each['pp']} x {each['tp']}", name,
                f"{each['medians'][name]['seconds']:.3f}", f"{ratio:.2f}", f"{each['cpu ratios'][name]:.2f}",
            )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
