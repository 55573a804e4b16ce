"""On one GPU, compare a step of graphpp over 4 local stages with the uncut model under torch.compile.

    python benchmarks/gpu_step.py [--backend inductor] [--cudagraphs]      1.1 B-parameter Llama in bfloat16
    python benchmarks/gpu_step.py --small --compile-backend eager          the same code at tiny sizes, also on a CPU

One process; the same weights, microbatches and losses for all contenders, timed in turn:

    graphpp           Interleaved1F1B over 4 local stages, by the given backend; with --cudagraphs, a second time with graphs
    torch             torch.distributed.pipelining, eager, the same schedule over 4 manual stages on one rank
    torch.compile     the whole model and loss compiled, forward and backward of each microbatch in a plain loop

A step is forward and backward of all microbatches into fresh `param.grad`; no optimizer. Before timing, the losses must
agree to 2 % (bfloat16; 0.01 % in float32). Times are medians over rounds, ratios the medians of the rounds' ratios. MiB
is the most that a step allocates above the bytes allocated before it, gradients included. The memory pool of recorded
graphs is allocated before, so of the graphs only the values that outlive them count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Contender, Sample, alternate, median_ratio, medians, start, synchronize
from models import Config, Llama, Part, llama_1b, llama_small, loss, new_llama
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import graphpp

STAGES = 4


@dataclass(frozen=True)
class Case:
    """A model to train, and microbatches of `rows` x `length` tokens."""

    config: Config
    dtype: torch.dtype
    microbatches: int
    rows: int
    length: int

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages start, and the end."""
        return [stage * self.config.layers // STAGES for stage in range(STAGES + 1)]

    def model(self, device: torch.device) -> Llama:
        return new_llama(self.config, device).to(self.dtype)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all microbatches, [rows of all, length]."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            self.config.vocab, (self.microbatches * self.rows, self.length + 1), generator=generator
        )
        return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


@dataclass
class Step:
    """A contender: runs a step and returns the losses, [microbatches]."""

    parameters: list[nn.Parameter]
    losses: Callable[[], Tensor]

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def main() -> None:
    option = options()
    device = start()
    case = small(option) if option.small else large(option)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        record = measured(case, option, device)
    finally:
        dist.destroy_process_group()
    Console(width=120).print(table(record))
    if option.json:
        Path(option.json).write_text(json.dumps(record, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="eager", help="of graphpp.compile")
    parser.add_argument("--cudagraphs", action="store_true", help="graphpp once more, with cudagraphs=True")
    parser.add_argument("--offload", type=float, help="of graphpp.compile: a fraction of the saved bytes")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile")
    parser.add_argument("--compile-mode", help="of torch.compile")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a tiny model in float32")
    parser.add_argument("--json", help="file for the record")
    return parser.parse_args()


def large(option: argparse.Namespace) -> Case:
    return Case(llama_1b(), torch.bfloat16, option.microbatches, option.rows, option.length)


def small(option: argparse.Namespace) -> Case:
    return Case(llama_small(64, layers=STAGES), torch.float32, option.microbatches, 2, 16)


# ---------------------------------------------------------------------------------------------------------- contenders


def graphpp_step(case: Case, device: torch.device, **chosen: Any) -> Step:
    """The pipeline that graphpp compiles."""
    tokens, targets = case.batch(device)
    pipe = graphpp.compile(
        case.model(device),
        loss,
        example=graphpp.Microbatch((tokens[: case.rows],), target=targets[: case.rows]),
        split=[f"layers.{layer}" for layer in case.cuts[1:-1]],
        schedule="Interleaved1F1B",
        microbatches=case.microbatches,
        parallel=graphpp.Parallel(device=device),
        **chosen,
    )
    return Step(list(pipe.parameters()), lambda: pipe.step(tokens, target=targets).losses)


def torch_step(case: Case, device: torch.device) -> Step:
    """torch.distributed.pipelining, eager, with the shapes given so that it does not run the stages to find them."""
    model = case.model(device)
    tokens, targets = case.batch(device)
    stages = [torch_stage(case, model, index, device) for index in range(STAGES)]
    runner = ScheduleInterleaved1F1B(stages, case.microbatches, loss_fn=loss)

    def step() -> Tensor:
        losses: list[Tensor] = []
        runner.step(tokens, target=targets, losses=losses, return_outputs=False)
        return torch.stack([value.detach() for value in losses])

    return Step(list(model.parameters()), step)


class LocalStage(PipelineStage):
    """A stage whose neighbours are in its own process."""

    def _get_init_p2p_neighbors_ops(self) -> list[torch.distributed.P2POp]:
        return []  # torch 2.11 greets the neighbours' ranks before the first step; gloo cannot send to its own


def torch_stage(case: Case, model: Llama, index: int, device: torch.device) -> PipelineStage:
    shape = (case.rows, case.length)
    hidden = torch.empty(*shape, case.config.dim, dtype=case.dtype, device=device)
    logits = torch.empty(*shape, case.config.vocab, dtype=case.dtype, device=device)
    into = torch.empty(shape, dtype=torch.int64, device=device) if index == 0 else hidden.clone().requires_grad_()
    out = (logits if index == STAGES - 1 else hidden).requires_grad_()
    part = Part(model, case.cuts[index], case.cuts[index + 1])
    return LocalStage(part, index, STAGES, device, input_args=(into,), output_args=(out,))


def compiled_step(case: Case, device: torch.device, option: argparse.Namespace) -> Step:
    """One compiled function for forward and loss, and its compiled backward, over the same microbatches."""
    model = case.model(device)
    tokens, targets = case.batch(device)
    pairs = list(zip(tokens.split(case.rows), targets.split(case.rows), strict=True))
    mode = {} if option.compile_mode is None else {"mode": option.compile_mode}
    forward = torch.compile(lambda rows, following: loss(model(rows), following), backend=option.compile_backend, **mode)

    def step() -> Tensor:
        losses = []
        for rows, following in pairs:
            value = forward(rows, following)
            (value / case.microbatches).backward()
            losses.append(value.detach().clone())  # the next replay of a CUDA graph may overwrite the loss
        return torch.stack(losses)

    return Step(list(model.parameters()), step)


def steps_of(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Step]:
    """All contenders by name."""
    backend = {} if option.backend == "eager" else {"backend": option.backend}
    away = {} if option.offload is None else {"memory": graphpp.Memory(offload=option.offload)}
    steps = {"graphpp": graphpp_step(case, device, **backend, **away)}
    if option.cudagraphs:
        kind = graphpp.Eager if option.backend == "eager" else graphpp.Inductor
        steps["graphpp, graphs"] = graphpp_step(case, device, backend=kind(cudagraphs=True), **away)
    return {**steps, "torch": torch_step(case, device), "torch.compile": compiled_step(case, device, option)}


# --------------------------------------------------------------------------------------------------------- measurement


def measured(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time all contenders in turn."""
    steps = steps_of(case, option, device)
    check_losses(case, steps)
    contenders = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(contenders, 3, device)
    memory = {name: peak_bytes(step, device) for name, step in steps.items()}
    samples = alternate(contenders, option.rounds, device)
    return {
        "model": asdict(case.config),
        "dtype": str(case.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in steps["torch"].parameters),
        "microbatches": case.microbatches,
        "tokens": case.rows * case.length,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": option.backend,
        "compile backend": option.compile_backend,
        "memory": memory,
        "samples": {name: [asdict(sample) for sample in taken] for name, taken in samples.items()},
    }


def check_losses(case: Case, steps: dict[str, Step]) -> None:
    """Raise SystemExit where losses differ from eager torch's."""
    expected = steps["torch"].losses().float()
    tolerance = 1e-4 if case.dtype is torch.float32 else 2e-2
    for name, step in steps.items():
        found = step.losses().float()
        if not torch.allclose(found, expected, rtol=tolerance, atol=0):
            raise SystemExit(f"{name}: losses {found.tolist()}, eager torch {expected.tolist()}")


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """The most bytes that a step allocates above the bytes allocated before it; None on the CPU."""
    if device.type != "cuda":
        return None
    step.forget_gradients()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step.losses()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def table(record: dict[str, Any]) -> Table:
    """A line per contender: its time, and the ratios to the other contenders."""
    title = f"{record['parameters'] / 1e6:.1f} M parameters in {record['dtype']}, {STAGES} local stages, "
    title += f"{record['microbatches']} microbatches of {record['tokens']} tokens, {record['device']}, "
    title += f"backend {record['backend']}"
    shown = Table(title=title, title_justify="left", caption="torch / it, it / torch.compile: medians over the rounds")
    for column in ("", "ms", "cpu ms", "torch / it", "it / torch.compile", "MiB"):
        shown.add_column(column, justify="right" if column else "left")
    samples = {name: [Sample(**sample) for sample in taken] for name, taken in record["samples"].items()}
    for name, taken in samples.items():
        middle, memory = medians(taken), record["memory"][name]
        ratios = (median_ratio(samples["torch"], taken), median_ratio(taken, samples["torch.compile"]))
        cells = [f"{1e3 * middle.seconds:.1f}", f"{1e3 * middle.cpu:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        shown.add_row(name, *cells, "-" if memory is None else f"{memory / 2**20:.0f}")
    return shown


if __name__ == "__main__":
    main()
