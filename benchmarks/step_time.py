"""Is a step of graphpp faster than the same step of eager torch.distributed.pipelining?

    torchrun --nproc-per-node 2 benchmarks/step_time.py [--dims 64 256 512] [--schedules 1F1B Interleaved1F1B]

Three contenders run the same model, weights, microbatches and schedule, in turn: graphpp; torch's PipelineStage with
Schedule1F1B or ScheduleInterleaved1F1B on manual stages with given shapes (no probe run), its outputs not merged; one
eager process over the same microbatches (rank 0; the others wait). Before timing their losses must agree to 1e-5 of
their size. A step is forward and backward of all microbatches into fresh `param.grad`; no optimizer. Medians over
rounds; the ratio is the median of the rounds' ratios.

bound: the speed-up over one process that the bubble leaves, W M v / (M v + W - 1), for W ranks, M microbatches, v
stages a rank (Narayanan et al. 2021).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, Sample, alternate, median_ratio, medians, start, synchronize
from models import Config, Llama, Part, loss, new_llama
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import graphpp

STAGES_PER_RANK = {"1F1B": 1, "Interleaved1F1B": 2}
TORCH = {"1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}


@dataclass(frozen=True)
class Case:
    """One line of the table: model, schedule, and a batch of `rows` x `length` tokens per microbatch."""

    dim: int
    layers: int
    schedule: str
    microbatches: int
    rows: int
    length: int

    @property
    def stages(self) -> int:
        return RANKS * STAGES_PER_RANK[self.schedule]

    @property
    def bound(self) -> float:
        slots = self.microbatches * STAGES_PER_RANK[self.schedule]
        return RANKS * slots / (slots + RANKS - 1)

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages start, and the end: equal numbers of layers."""
        return [stage * self.layers // self.stages for stage in range(self.stages + 1)]

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all microbatches, [rows of all, length]."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.length + 1)
        tokens = torch.randint(256, shape, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass
class Step:
    """A contender's step: returns the losses of the microbatches on the rank that has them, [microbatches]."""

    parameters: list[nn.Parameter]
    losses: Callable[[], Tensor | None]

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def main() -> None:
    option = options()
    device = start()
    records = [record(case, option.rounds, device) for case in cases(option)]
    if RANK == 0:
        Console(width=190).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--schedules", nargs="+", default=list(STAGES_PER_RANK), choices=list(STAGES_PER_RANK))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def cases(option: argparse.Namespace) -> Iterable[Case]:
    for dim in option.dims:
        for schedule in option.schedules:
            yield Case(dim, option.layers, schedule, option.microbatches, option.rows, option.length)


# ---------------------------------------------------------------------------------------------------------- contenders


def graphpp_step(case: Case, device: torch.device) -> Step:
    """The pipeline that graphpp compiles."""
    model = new_llama(Config.small(case.dim, case.layers))
    tokens, targets = case.batch(device)
    split = [f"layers.{layer}" for layer in case.cuts[1:-1]]
    example = graphpp.Microbatch((tokens[: case.rows],), target=targets[: case.rows])
    pipe = graphpp.compile(
        model,
        loss,
        example=example,
        split=split,
        schedule=case.schedule,
        microbatches=case.microbatches,
        device=device,
    )
    return Step(list(pipe.parameters()), lambda: pipe.step(tokens, target=targets).losses)


def torch_step(case: Case, device: torch.device) -> Step:
    """torch.distributed.pipelining, eager, with everything given that spares it work."""
    model = new_llama(Config.small(case.dim, case.layers))
    tokens, targets = case.batch(device)
    stages = [torch_stage(case, model, index, device) for index in range(RANK, case.stages, RANKS)]
    single = STAGES_PER_RANK[case.schedule] == 1
    runner = TORCH[case.schedule](stages[0] if single else stages, case.microbatches, loss_fn=loss)
    has_first, has_last = stages[0].is_first, stages[-1].is_last

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if has_last else {}
        runner.step(*((tokens,) if has_first else ()), return_outputs=False, **given)
        return torch.stack([value.detach() for value in losses]) if has_last else None

    return Step([parameter for stage in stages for parameter in stage.submod.parameters()], step)


def torch_stage(case: Case, model: Llama, index: int, device: torch.device) -> PipelineStage:
    """A manual stage with the shapes of one microbatch given, so that the module is not run to find them."""
    part = Part(model, case.cuts[index], case.cuts[index + 1]).to(device)
    hidden = torch.empty(case.rows, case.length, case.dim, device=device)
    tokens = torch.empty(case.rows, case.length, dtype=torch.int64, device=device)
    logits = torch.empty(case.rows, case.length, 256, device=device)
    into = tokens if index == 0 else hidden.clone().requires_grad_()
    out = (logits if index == case.stages - 1 else hidden).requires_grad_()
    return PipelineStage(part, index, case.stages, device, input_args=(into,), output_args=(out,))


def plain_step(case: Case, device: torch.device) -> Step:
    """One eager process that accumulates gradients over the microbatches."""
    model = new_llama(Config.small(case.dim, case.layers)).to(device)
    tokens, targets = case.batch(device)
    pairs = list(zip(tokens.split(case.rows), targets.split(case.rows), strict=True))

    def step() -> Tensor:
        losses = []
        for rows, following in pairs:
            value = loss(model(rows), following)
            (value / case.microbatches).backward()
            losses.append(value.detach())
        return torch.stack(losses)

    return Step(list(model.parameters()), step)


# --------------------------------------------------------------------------------------------------------- measurement


def record(case: Case, rounds: int, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time all contenders in turn."""
    plain = plain_step(case, device)
    steps = {"graphpp": graphpp_step(case, device), "torch": torch_step(case, device)}
    check_losses(case, steps, plain, device)
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    contenders["plain"] = Contender(plain.losses, plain.forget_gradients, everywhere=False)
    alternate(contenders, 2, device)
    samples = alternate(contenders, rounds, device)
    return {
        "dim": case.dim,
        "layers": case.layers,
        "schedule": case.schedule,
        "ranks": RANKS,
        "microbatches": case.microbatches,
        "tokens": case.rows * case.length,
        "device": device.type,
        "bound": case.bound,
        "samples": {name: [asdict(sample) for sample in taken] for name, taken in samples.items()},
    }


def check_losses(case: Case, steps: dict[str, Step], plain: Step, device: torch.device) -> None:
    """Raise where a pipeline's losses are not the plain loop's."""
    expected = plain.losses()
    assert expected is not None
    for name, step in steps.items():
        found = step.losses()
        synchronize(device)
        if found is not None and not torch.allclose(found, expected, rtol=1e-5, atol=0):
            raise SystemExit(f"{name} at {case}: losses {found.tolist()}, one process {expected.tolist()}")


def table(records: list[dict[str, Any]]) -> Table:
    """Medians, ratios and bounds; one line per case."""
    first = records[0]
    title = f"{first['ranks']} ranks, {first['device']}, {first['layers']} layers, "
    title += f"{first['microbatches']} microbatches of {first['tokens']} tokens"
    caption = "ms: medians of the slowest rank; cpu ms, page faults: all ranks; ratios: median over the rounds"
    shown = Table(title=title, title_justify="left", caption=caption)
    for column in ("dim", "schedule", "graphpp ms", "torch ms", "plain ms", "torch/graphpp"):
        shown.add_column(column, justify="right")
    for column in ("speed-up graphpp", "torch", "bound", "cpu ms g", "t", "p", "faults g", "t", "p"):
        shown.add_column(column, justify="right")
    for row in records:
        shown.add_row(*line(row))
    return shown


def line(row: dict[str, Any]) -> list[str]:
    """One record as cells."""
    samples = {name: [Sample(**sample) for sample in taken] for name, taken in row["samples"].items()}
    order = [medians(samples[name]) for name in ("graphpp", "torch", "plain")]
    ratios = [
        median_ratio(samples["torch"], samples["graphpp"]),
        *(median_ratio(samples["plain"], samples[name]) for name in ("graphpp", "torch")),
        row["bound"],
    ]
    return [
        str(row["dim"]),
        row["schedule"],
        *(f"{1e3 * middle.seconds:.1f}" for middle in order),
        *(f"{ratio:.2f}" for ratio in ratios),
        *(f"{1e3 * middle.cpu:.1f}" for middle in order),
        *(f"{middle.faults:.0f}" for middle in order),
    ]


if __name__ == "__main__":
    main()
