"""The ways to run a step that the benchmarks compare, over one model with the same weights and the same microbatches.

    pipeline      the pipeline that graphpp compiles, with a backend
    torch_step    torch's PipelineStage and schedule on manual stages with given shapes (no probe run), its outputs not
                  merged; `compiled`: each stage's module under torch.compile
    spread        a Llama's layers over the ranks of `tp`
    plain_step    one process that adds up gradients over the microbatches; `compiled`: model and loss under torch.compile

Contract: a step is forward and backward of all microbatches into fresh `param.grad`, without an optimizer. `check_losses`
raises SystemExit where two contenders compute different losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from harness import RANK, RANKS, synchronize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workloads import Workload

import graphpp
from graphpp.schedules.generate.read import ScheduleLike, default_stages, make_table

TORCH: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
COMPILED = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")  # torch refuses compiled modules in its other schedules, or fails
BACKENDS = ("eager", "inductor")
TOLERANCE = {"eager": 1e-5, "inductor": 1e-4}  # of losses, relative


@dataclass(frozen=True)
class Case:
    """A model, a schedule for `ranks` ranks, and microbatches of `rows` rows."""

    workload: Workload
    schedule: ScheduleLike
    microbatches: int
    rows: int
    ranks: int = field(default_factory=lambda: RANKS)

    @property
    def stages(self) -> int:
        return default_stages(self.schedule, self.ranks)

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages start, and the end: equal numbers of layers."""
        return [stage * self.workload.size.layers // self.stages for stage in range(self.stages + 1)]

    @property
    def table(self) -> graphpp.Schedule:
        return make_table(self.schedule, self.ranks, self.stages, self.microbatches)

    @property
    def bound(self) -> float:
        """The speed-up over one process that the bubble leaves: ranks x (1 - bubble), stages alike, messages free."""
        timeline = graphpp.simulate(self.table, graphpp.Costs.unit(self.stages, self.ranks))
        return sum(1 - timeline.bubble(rank) for rank in range(self.ranks))

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all microbatches."""
        inputs, targets = self.workload.batch(self.microbatches * self.rows)
        return inputs.to(device), targets.to(device)

    def without_dropout(self) -> Case:
        return replace(self, workload=self.workload.without_dropout())


@dataclass(frozen=True)
class Step:
    """A contender: this rank's parameters; `losses` runs a step and returns [microbatches], or None where a rank has none."""

    parameters: list[nn.Parameter]
    losses: Callable[[], Tensor | None]
    tolerance: float = TOLERANCE["eager"]

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# ------------------------------------------------------------------------------------------------------------- graphpp


def pipeline(
    case: Case,
    device: torch.device,
    backend: str = "eager",
    recompute: Any = None,
    mesh: DeviceMesh | None = None,
    artifact: str | None = None,
) -> graphpp.Pipeline:
    """The pipeline that graphpp compiles; on a mesh with `tp` its layers are spread."""
    inputs, targets = case.workload.batch(case.rows)
    model = case.workload.model()
    return graphpp.compile(
        spread(model, mesh["tp"]) if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else model,
        case.workload.loss,
        example=graphpp.Microbatch((inputs,), target=targets),
        split=[f"layers.{layer}" for layer in case.cuts[1:-1]],
        schedule=case.schedule,
        microbatches=case.microbatches,
        memory=recompute,
        backend=backend,
        artifact=artifact,
        mesh=mesh,
        parallel=graphpp.Parallel(device=device),
    )


def pipeline_step(pipe: graphpp.Pipeline, case: Case, device: torch.device, backend: str = "eager") -> Step:
    """A step of a pipeline."""
    inputs, targets = case.batch(device)
    return Step(list(pipe.parameters()), lambda: pipe.step(inputs, target=targets).losses, TOLERANCE[backend])


def spread(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread the layers of a Llama over the ranks of `mesh`, as torch's documentation does; of a stage those that are there."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {f"attention.{name}": column for name in ("wq", "wk", "wv")}
    plan |= {"feed_forward.w1": column, "feed_forward.w3": column, "attention.wo": row, "feed_forward.w2": row}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


# --------------------------------------------------------------------------------------------------------------- torch


def torch_step(case: Case, device: torch.device, *, compiled: bool = False) -> Step:
    """A step of torch.distributed.pipelining, with shapes given and outputs not merged, which is its fastest way."""
    inputs, targets = case.batch(device)
    stages = torch_stages(case, device, compiled)
    kind, single = TORCH[str(case.schedule)], case.stages == RANKS
    runner = kind(stages[0] if single else stages, case.microbatches, loss_fn=case.workload.loss)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runner.step(*((inputs,) if first else ()), return_outputs=False, **given)
        return torch.stack([value.detach() for value in losses]) if last else None

    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    return Step(parameters, step, TOLERANCE["inductor" if compiled else "eager"])


def torch_stages(case: Case, device: torch.device, compiled: bool) -> list[PipelineStage]:
    """This rank's stages, with the shapes of one microbatch."""
    modules, values = stage_modules(case.workload, case.cuts, case.rows)
    stages = []
    for index in (index for index, rank in case.table.rank_of_stage.items() if rank == RANK):
        module = modules[index].to(device)
        module = torch.compile(module, dynamic=False, fullgraph=True) if compiled else module
        into, out = (like(value, device) for value in values[index : index + 2])
        stages.append(PipelineStage(module, index, case.stages, device, input_args=(into,), output_args=(out,)))
    return stages


def stage_modules(workload: Workload, cuts: Sequence[int], rows: int) -> tuple[list[nn.Module], list[Tensor]]:
    """The module of each stage between two cuts, and the values of one microbatch that go into and come out of the stages."""
    model = workload.model()
    modules = [workload.part(model, start, end) for start, end in pairwise(cuts)]
    values = [workload.batch(rows)[0]]
    with torch.no_grad():
        for module in modules:
            values.append(module(values[-1]))
    return modules, values


def like(value: Tensor, device: torch.device) -> Tensor:
    """An empty tensor of the same shape; it requires a gradient if its dtype is floating."""
    return torch.empty_like(value, device=device).requires_grad_(value.is_floating_point())


# --------------------------------------------------------------------------------------------------------- one process


def plain_step(case: Case, device: torch.device, *, compiled: bool = False) -> Step:
    """One process without a pipeline."""
    model, loss = case.workload.model().to(device), case.workload.loss
    pairs = list(zip(*(part.split(case.rows) for part in case.batch(device)), strict=True))

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(model(inputs), targets)

    run = torch.compile(forward, dynamic=False, fullgraph=True) if compiled else forward

    def step() -> Tensor:
        losses = []
        for inputs, targets in pairs:
            value = run(inputs, targets)
            (value / case.microbatches).backward()
            losses.append(value.detach())
        return torch.stack(losses)

    return Step(list(model.parameters()), step, TOLERANCE["inductor" if compiled else "eager"])


# --------------------------------------------------------------------------------------------------------------- checks


def check_losses(expected: Step, steps: Mapping[str, Step], device: torch.device) -> None:
    """Raise SystemExit where a step's losses differ from those of `expected` by more than the larger relative tolerance."""
    wanted = losses_of(expected, device)
    for name, step in steps.items():
        found = losses_of(step, device)
        tolerance = max(step.tolerance, expected.tolerance)
        if found is not None and wanted is not None and not torch.allclose(found, wanted, rtol=tolerance, atol=0):
            raise SystemExit(f"{name}: losses {found.tolist()}, expected {wanted.tolist()}")


def check_on_average(expected: Step, steps: Mapping[str, Step], device: torch.device, repeats: int = 4) -> None:
    """Raise SystemExit where mean losses with dropout differ from those of `expected` by more than 5 standard errors."""
    wanted = many_losses(expected, repeats, device)
    for name, step in steps.items():
        found = many_losses(step, repeats, device)
        if found is None or wanted is None:
            continue
        apart = found - wanted
        if apart.mean().abs() > 5 * apart.std() / len(apart) ** 0.5:
            raise SystemExit(f"{name}: mean loss {found.mean():.5f}, expected {wanted.mean():.5f}")


def many_losses(step: Step, repeats: int, device: torch.device) -> Tensor | None:
    """The losses of several steps, [repeats * microbatches]."""
    found = [losses_of(step, device) for _ in range(repeats)]
    here = [losses for losses in found if losses is not None]
    return torch.cat(here) if here else None


def losses_of(step: Step, device: torch.device) -> Tensor | None:
    """The losses of one step; its gradients are dropped."""
    losses = step.losses()
    synchronize(device)
    step.forget_gradients()
    return losses
