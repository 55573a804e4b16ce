"""Which schedule is fastest here, and what do simulator and torch say to each?

    torchrun --nproc-per-node 2 benchmarks/schedules.py [--dim 256] [--schedules 1F1B V-Min ..]     (also with 4)

All schedules run one model with one seed over the same microbatches, in turn, round by round; those of torch that
torch's runtime has run beside them on manual stages (eager; shapes given). Losses must agree to 1e-5 first. For each:
step time (median of the slowest rank), ratio to graphpp's Interleaved1F1B and to torch's run of the same schedule (medians
of the rounds' ratios), the bubble (mean over ranks) measured and simulated from the profile's costs, the simulated step
against the measured one, the most activation bytes alive on a rank by the checker.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, Sample, alternate, median_ratio, medians, start
from models import Config, Part, loss, new_llama
from rich.console import Console
from rich.table import Table
from step_time import Step
from torch import Tensor
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

import graphpp
from graphpp.runtime.source import build, default_stages

TORCH: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
BASE = "Interleaved1F1B"
OWN = ("MegatronInterleaved", "ZB1P", "ZB2P", "V-Half", "V-Min", "Combined1F1B", "searched")


@dataclass(frozen=True)
class Work:
    """Model and batch."""

    dim: int
    layers: int
    microbatches: int
    rows: int
    length: int

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [rows of all microbatches, length]."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.length + 1)
        tokens = torch.randint(256, shape, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    option = options()
    device = start()
    work = Work(option.dim, option.layers, option.microbatches, option.rows, option.length)
    records = measured(work, option, device)
    if RANK == 0:
        Console(width=170).print(table(work, records, device))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--schedules", nargs="+", default=[*TORCH, *OWN])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------- contenders


def cuts(work: Work, stages: int) -> list[int]:
    """The layers at which stages start, and the end."""
    return [stage * work.layers // stages for stage in range(stages + 1)]


def compiled(work: Work, schedule: Any, stages: int, device: torch.device) -> graphpp.Pipeline:
    split = [f"layers.{layer}" for layer in cuts(work, stages)[1:-1]]
    model = new_llama(Config.small(work.dim, work.layers))
    tokens, targets = (part[: work.rows] for part in work.batch(device))
    example = graphpp.Microbatch((tokens,), target=targets)
    return graphpp.compile(
        model, loss, example=example, split=split, schedule=schedule, microbatches=work.microbatches, device=device
    )


def torch_step(work: Work, name: str, device: torch.device) -> Step:
    """torch's own runtime on manual stages."""
    model, (tokens, targets) = new_llama(Config.small(work.dim, work.layers)), work.batch(device)
    stages = default_stages(name, RANKS)
    home = build(name, RANKS, stages, work.microbatches).rank_of_stage
    mine = [torch_stage(work, model, index, stages, device) for index in range(stages) if home[index] == RANK]
    single = stages == RANKS
    runner = TORCH[name](mine[0] if single else mine, work.microbatches, loss_fn=loss)
    first, last = any(stage.is_first for stage in mine), any(stage.is_last for stage in mine)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runner.step(*((tokens,) if first else ()), return_outputs=False, **given)
        return torch.stack([value.detach() for value in losses]) if last else None

    return Step([parameter for stage in mine for parameter in stage.submod.parameters()], step)


def torch_stage(work: Work, model: Any, index: int, stages: int, device: torch.device) -> PipelineStage:
    """A manual stage with the shapes of one microbatch given."""
    at = cuts(work, stages)
    part = Part(model, at[index], at[index + 1]).to(device)
    hidden = torch.empty(work.rows, work.length, work.dim, device=device)
    tokens = torch.empty(work.rows, work.length, dtype=torch.int64, device=device)
    logits = torch.empty(work.rows, work.length, 256, device=device)
    into = tokens if index == 0 else hidden.clone().requires_grad_()
    out = (logits if index == stages - 1 else hidden).requires_grad_()
    return PipelineStage(part, index, stages, device, input_args=(into,), output_args=(out,))


# --------------------------------------------------------------------------------------------------------- measurement


def measured(work: Work, option: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """All schedules: samples of the steps, and what profile, simulator and checker say."""
    tokens, targets = work.batch(device)
    pipes = {name: compiled(work, name, default_stages(name, RANKS), device) for name in option.schedules if name != "searched"}
    profiles = {name: pipe.profile(tokens, target=targets) for name, pipe in pipes.items()}
    if "searched" in option.schedules:
        pipes["searched"] = searched(work, profiles, device)
        profiles["searched"] = pipes["searched"].profile(tokens, target=targets)
    steps = {name: Step(list(pipe.parameters()), _losses(pipe, tokens, targets)) for name, pipe in pipes.items()}
    steps |= {f"torch {name}": torch_step(work, name, device) for name in pipes if name in TORCH}
    check_losses(steps)
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(contenders, 1, device)
    samples = alternate(contenders, option.rounds, device)
    return {name: record(name, pipes[name], profiles[name], samples) for name in pipes}


def searched(work: Work, profiles: dict[str, graphpp.Profile], device: torch.device) -> graphpp.Pipeline:
    """The schedule that the search finds for the costs of two stages a rank."""
    costs = next(profiles[name].costs for name in profiles if len(profiles[name].costs.stages) == 2 * RANKS)
    found = graphpp.schedule_auto(costs, ranks=RANKS, microbatches=work.microbatches)
    return compiled(work, found, 2 * RANKS, device)


def _losses(pipe: graphpp.Pipeline, tokens: Tensor, targets: Tensor) -> Any:
    return lambda: pipe.step(tokens, target=targets).losses


def check_losses(steps: dict[str, Step]) -> None:
    """Raise where two contenders' losses differ."""
    expected: Tensor | None = None
    for name, step in steps.items():
        found = step.losses()
        step.forget_gradients()
        expected = found if expected is None else expected
        if found is not None and expected is not None and not torch.allclose(found, expected, rtol=1e-5, atol=0):
            raise SystemExit(f"{name}: losses {found.tolist()}, others {expected.tolist()}")


def record(name: str, pipe: graphpp.Pipeline, profile: graphpp.Profile, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """One schedule's figures."""
    timeline, ranks = profile.timeline, range(RANKS)
    simulated = graphpp.simulate(timeline.schedule, profile.costs)
    peaks = graphpp.schedules.peak_bytes(timeline.schedule, profile.costs)
    return {
        "samples": [asdict(sample) for sample in samples[name]],
        "base": median_ratio(samples[BASE], samples[name]) if BASE in samples else None,
        "torch": median_ratio(samples[f"torch {name}"], samples[name]) if f"torch {name}" in samples else None,
        "bubble": sum(map(timeline.bubble, ranks)) / RANKS,
        "simulated bubble": sum(map(simulated.bubble, ranks)) / RANKS,
        "profiled": timeline.makespan,
        "simulated": simulated.makespan,
        "peak": max(peaks),
    }


def table(work: Work, records: dict[str, dict[str, Any]], device: torch.device) -> Table:
    """One line a schedule."""
    title = f"{RANKS} ranks, {device.type}, d={work.dim}, {work.layers} layers, {work.microbatches} microbatches"
    shown = Table(title=title, title_justify="left")
    ratios, bubbles, steps = (f"{BASE}/it", "torch/it"), ("bubble", "simulated"), ("step profiled", "simulated", "off by")
    names = ("schedule", "step ms", *ratios, *bubbles, *steps, "peak MiB")
    for column in names:
        shown.add_column(column, justify="right")
    for name, row in records.items():
        middle = medians(Sample(**sample) for sample in row["samples"])
        shown.add_row(
            name,
            f"{1e3 * middle.seconds:.0f}",
            *("" if row[key] is None else f"{row[key]:.2f}" for key in ("base", "torch")),
            *(f"{100 * row[key]:.0f} %" for key in ("bubble", "simulated bubble")),
            *(f"{1e3 * row[key]:.0f}" for key in ("profiled", "simulated")),
            f"{100 * (row['simulated'] / row['profiled'] - 1):+.0f} %",
            f"{row['peak'] / 2**20:.1f}",
        )
    return shown


if __name__ == "__main__":
    main()
