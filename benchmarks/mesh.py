"""Compare a step with sharded parameters: graphpp's shards, graphpp's replicas, and FSDP2 with torch.distributed.pipelining.

    torchrun --nproc-per-node 4 benchmarks/mesh.py [--pp 2] [--schedules 1F1B Interleaved1F1B] [--keep 1] [--dims 256 512]

All contenders run the same model, weights, microbatches and schedule on a mesh of `pp` x data ranks. Each replica has a batch
of its own. They run in turn:

    shards      graphpp, dp_shard, all stages of a rank whole during a step
    keep=k      graphpp, dp_shard, at most k stages whole (for each of --keep)
    replicas    graphpp, dp_replicate
    fsdp2       torch: fully_shard of each layer and stage, without resharding after the forward, torch's schedule

Losses must agree first, to 1e-5 of their size. Medians over rounds; a ratio is the median of the rounds' ratios to fsdp2.

sent: the bytes that a rank sends in a step along the data dimension, counted from the collectives that run: (N-1) times the
input of an all-gather, (N-1)/N of the input of a reduce-scatter or all-to-all, 2 (N-1)/N of an all-reduce; per parameter of the
rank.

peak: the most bytes at one time of the second of two steps that accumulate gradients, of the rank with the most: `param.grad`
of the first step, and all that the allocator gives out in the second one (gathered parameters, sums of gradients, messages,
activations, workspace of kernels). plan: the same bytes as `pipe.plan.memory` foretells them, which knows no workspace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import TORCH, like, stage_modules
from harness import RANK, RANKS, Contender, alternate, median_ratio, medians, over_ranks, start
from memory import allocated
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import Size, Workload, add_sizes, workload

import graphpp
from graphpp.runtime.dtensors import local_tensor
from graphpp.schedules.generate.read import default_stages, make_table

MIB = 1 << 20


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends by collectives of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._name, self._ranks, self.bytes = group.group_name, dist.get_world_size(group), 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._count(name.partition("::")[2], args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        groups = {found.group_name if hasattr(found, "group_name") else found for found in map(_unboxed, tree_leaves(args))}
        if self._name not in groups:
            return
        n, sizes = self._ranks, [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if "allgather" in name or "all_gather" in name:
            self.bytes += (n - 1) * min(sizes) if "coalesced" not in name else (n - 1) * sum(sizes) / (n + 1)
        elif "reduce_scatter" in name:
            self.bytes += (n - 1) / n * max(sizes)
        elif "alltoall" in name or "all_to_all" in name:
            self.bytes += (n - 1) / n * sizes[1] if len(sizes) > 1 else (n - 1) / n * sizes[0]
        elif "allreduce" in name or "all_reduce" in name:
            self.bytes += 2 * (n - 1) / n * sum(sizes)


def _unboxed(leaf: Any) -> Any:
    """A process group that an operator was given in a box."""
    try:
        return dist.ProcessGroup.unbox(leaf) if type(leaf).__name__ == "ScriptObject" else leaf
    except (RuntimeError, TypeError):
        return None


@dataclass(frozen=True)
class Case:
    """A model and a schedule on a mesh of `pp` x data ranks."""

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

    def batch(self, replica: int) -> tuple[Tensor, Tensor]:
        return self.workload.batch(self.microbatches * self.rows, seed=1 + replica)


@dataclass(frozen=True)
class Contestant:
    """`run` makes a step; its losses, [microbatches], on ranks that have them; `forget` drops the gradients.

    `parameters`: those of the rank's stages; `foretold`: the bytes of the plan but for parameters (None: there is no plan).
    """

    run: Callable[[], Tensor | None]
    forget: Callable[[], None]
    parameters: list[Tensor]
    foretold: int | None = None


def ours(case: Case, dimension: str, keep: int | None, groups: list[dist.ProcessGroup]) -> Contestant:
    mesh = init_device_mesh("cpu", (case.pp, RANKS // case.pp), mesh_dim_names=("pp", dimension))
    groups.append(mesh[dimension].get_group())
    inputs, targets = case.workload.batch(case.rows)
    pipe = graphpp.compile(
        case.workload.model(),
        case.workload.loss,
        example=graphpp.Microbatch((inputs,), target=targets),
        split=[f"layers.{layer}" for layer in case.cuts[1:-1]],
        schedule=case.schedule,
        microbatches=case.microbatches,
        mesh=mesh,
        parallel=graphpp.Parallel(keep=keep, check_data=0),
    )
    inputs, targets = case.batch(mesh[dimension].get_local_rank())
    own: list[Tensor] = list(pipe.parameters())
    rows = sum(local_tensor(each).nbytes for each in own)
    planned = pipe.plan.memory.ranks[mesh["pp"].get_local_rank()]
    foretold = planned.peak - planned.optimizer - planned.buffers - rows
    return Contestant(lambda: pipe.step(inputs, target=targets).losses, pipe.zero_grad, own, foretold)


def fsdp2(case: Case, groups: list[dist.ProcessGroup]) -> Contestant:
    mesh = init_device_mesh("cpu", (case.pp, RANKS // case.pp), mesh_dim_names=("pp", "dp"))
    groups.append(mesh["dp"].get_group())
    stages = _torch_stages(case, mesh)
    single = case.stages == case.pp
    runner = TORCH[case.schedule](stages[0] if single else stages, case.microbatches, loss_fn=case.workload.loss)
    inputs, targets = case.batch(mesh["dp"].get_local_rank())
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    parameters: list[Tensor] = [parameter for stage in stages for parameter in stage.submod.parameters()]

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runner.step(*((inputs,) if first else ()), return_outputs=False, **given)
        return torch.stack([value.detach() for value in losses]) if last else None

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    return Contestant(step, forget, parameters)


def _torch_stages(case: Case, mesh: DeviceMesh) -> list[PipelineStage]:
    table = make_table(case.schedule, case.pp, case.stages, case.microbatches)
    modules, values = stage_modules(case.workload, case.cuts, case.rows)
    own = [index for index, rank in table.rank_of_stage.items() if rank == mesh["pp"].get_local_rank()]
    group, cpu, found = mesh["pp"].get_group(), torch.device("cpu"), []
    for index in own:
        for layer in modules[index].layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(modules[index], mesh=mesh["dp"], reshard_after_forward=False)
        into, out = (like(value, cpu) for value in values[index : index + 2])
        stage = PipelineStage(modules[index], index, case.stages, cpu, input_args=(into,), output_args=(out,), group=group)
        found.append(stage)
    return found


def record(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    groups: list[dist.ProcessGroup] = []
    ways = {
        "fsdp2": lambda: fsdp2(case, groups),
        "shards": lambda: ours(case, "dp_shard", None, groups),
        **{f"keep={keep}": lambda keep=keep: ours(case, "dp_shard", keep, groups) for keep in option.keep},
        "replicas": lambda: ours(case, "dp_replicate", None, groups),
    }
    made = {name: make() for name, make in ways.items() if name not in option.without}
    check_losses(made)
    sent = {name: over_ranks([counted(each, group)]) for (name, each), group in zip(made.items(), groups, strict=True)}
    peaks = {name: over_ranks([float(peak(each)), float(each.foretold or 0)]) for name, each in made.items()}
    timed = {name: Contender(each.run, each.forget) for name, each in made.items()}
    alternate(timed, 2, device)
    samples = alternate(timed, option.rounds, device)
    base = "fsdp2" if "fsdp2" in samples else "shards"
    return {
        "model": case.workload.name, "dim": case.workload.size.dim, "schedule": case.schedule, "pp": case.pp, "ranks": RANKS,
        "ratios": {name: median_ratio(taken, samples[base]) for name, taken in samples.items()},
        "cpu ratios": {name: median_ratio(taken, samples[base], "cpu") for name, taken in samples.items()},
        "medians": {name: asdict(medians(taken)) for name, taken in samples.items()},
        "peaks": {name: [value for value, _ in each] for name, each in peaks.items()},
        "foretold": {name: [value for _, value in each] for name, each in peaks.items()},
        "sent per parameter": {name: [value for (value,) in each] for name, each in sent.items()},
    }  # fmt: skip


def counted(contestant: Contestant, group: dist.ProcessGroup) -> float:
    """The bytes per parameter that this rank sends along the data dimension in one step."""
    contestant.forget()
    with Sent(group) as sent:
        contestant.run()
    contestant.forget()
    return sent.bytes / sum(each.numel() for each in contestant.parameters)


def peak(contestant: Contestant) -> int:
    """The most bytes of gradients and of all that a step takes, in the second of two steps."""
    contestant.forget()
    contestant.run()
    gradients = sum(local_tensor(each.grad).nbytes for each in contestant.parameters if each.grad is not None)
    found = gradients + allocated(contestant.run)
    contestant.forget()
    return found


def check_losses(contestants: dict[str, Contestant]) -> None:
    found = {name: contestant.run() for name, contestant in contestants.items()}
    for contestant in contestants.values():
        contestant.forget()
    here = {name: losses for name, losses in found.items() if losses is not None}
    if "fsdp2" in here:
        for name, losses in here.items():
            if not torch.allclose(losses, here["fsdp2"], rtol=1e-5, atol=0):
                raise SystemExit(f"{name}: losses {losses.tolist()}, of fsdp2 {here['fsdp2'].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama"])
    parser.add_argument("--dims", type=int, nargs="+", default=[256])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"], choices=list(TORCH))
    parser.add_argument("--pp", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--keep", type=int, nargs="*", default=[1])
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the records")
    option = parser.parse_args()
    device, records = start(), []
    for name, dim, schedule in product(option.models, option.dims, option.schedules):
        size = Size(dim, option.layers, option.length, 0.0)
        case = Case(workload(name, size), schedule, option.pp, option.microbatches, option.rows)
        records.append(record(case, option, device))
    if RANK == 0:
        Console(width=200).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> Table:
    found = Table("model", "d", "schedule", "contender", "s", "ratio", "CPU ratio", "peak", "plan", "sent, bytes a parameter")
    for each in records:
        for name, ratio in each["ratios"].items():
            sent = ", ".join(f"{value:.2f}" for value in sorted(set(each["sent per parameter"][name])))
            most, planned = (max(each[key][name]) / MIB for key in ("peaks", "foretold"))
            found.add_row(
                each["model"], str(each["dim"]), each["schedule"], name, f"{each['medians'][name]['seconds']:.3f}",
                f"{ratio:.2f}", f"{each['cpu ratios'][name]:.2f}", f"{most:.2f}", f"{planned:.2f}" if planned else "", sent,
            )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
