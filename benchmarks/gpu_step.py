"""On one GPU, compare a step of graphpp over 4 local stages with the uncut model under torch.compile.

    python benchmarks/gpu_step.py [--backend inductor] [--variants graphs zero_bubble ..]   1.1 B-parameter Llama in bfloat16
    python benchmarks/gpu_step.py --small --compile-backend eager          the same code at tiny sizes, also on a CPU

One process; the same weights, microbatches and losses for all contenders, timed in turn:

    graphpp           Interleaved1F1B over 4 local stages, by the given backend
    torch             torch.distributed.pipelining, eager, the same schedule over 4 manual stages on one rank
    torch.compile     the whole model and loss compiled, forward and backward of each microbatch in a plain loop

and with --variants further pipelines of graphpp, which differ in one thing from the first:

    eager             the eager backend
    graphs            CUDA graphs
    zero_bubble       InterleavedZeroBubble: backwards in two parts
    zbv               ZBVZeroBubble over 2 local stages
    recompute         every layer computed a second time
    looped            LoopedBFS: all forwards before the first backward
    offload           LoopedBFS, with the fraction --offload of the saved bytes in the host's memory meanwhile

A step is forward and backward of all microbatches into fresh `param.grad`; no optimizer. Before timing, the losses must
agree to 2 % (bfloat16; 0.01 % in float32). Times are medians over rounds, ratios the medians of the rounds' ratios. MiB
is the most that a step allocates above the bytes allocated before it, gradients included. The memory pool of recorded
graphs is allocated before, so of the graphs only the values that outlive them count. "predicted": the step of the pipeline's
own profile and the bytes of its plan, over the measured ones, less 1.

"hidden" of offload: 1 less the seconds that its step takes more than that of `looped`, over the seconds of its copies by the
bandwidth of pinned memory, which is measured, too: copies to the host and back one after the other.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_step_table import hidden_share, table
from harness import Contender, alternate, start, synchronize
from models import Config, Llama, Part, llama_1b, llama_small, loss, new_llama
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import graphpp

STAGES = 4
KINDS = {"eager": graphpp.Eager, "inductor": graphpp.Inductor}
# By name, the options of `graphpp.compile` in which a variant differs from the first pipeline; "stages": how many it has.
VARIANTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "eager": lambda option: {"backend": "eager"},
    "graphs": lambda option: {"backend": KINDS[option.backend](cudagraphs=True)},
    "zero_bubble": lambda option: {"schedule": "InterleavedZeroBubble"},
    "zbv": lambda option: {"schedule": "ZBVZeroBubble", "stages": 2},
    "recompute": lambda option: {"memory": graphpp.Memory(recompute="full")},
    "looped": lambda option: {"schedule": "LoopedBFS"},
    "offload": lambda option: {"schedule": "LoopedBFS", "memory": graphpp.Memory(offload=option.offload)},
}


@dataclass(frozen=True)
class Case:
    """A model to train, and microbatches of `rows` x `length` tokens."""

    config: Config
    dtype: torch.dtype
    microbatches: int
    rows: int
    length: int

    def cuts(self, stages: int = STAGES) -> list[int]:
        """The layers at which stages start, and the end."""
        return [stage * self.config.layers // stages for stage in range(stages + 1)]

    def model(self, device: torch.device) -> Llama:
        """A new model with the weights of all contenders."""
        return copy.deepcopy(_weights(self.config, self.dtype, device))

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all microbatches, [rows of all, length]."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            self.config.vocab, (self.microbatches * self.rows, self.length + 1), generator=generator
        )
        return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


@functools.cache
def _weights(config: Config, dtype: torch.dtype, device: torch.device) -> Llama:
    return new_llama(config, device).to(dtype)


@dataclass
class Step:
    """A contender: runs a step and returns the losses, [microbatches]. `pipe`: its pipeline, if graphpp runs it."""

    parameters: list[nn.Parameter]
    losses: Callable[[], Tensor]
    pipe: graphpp.Pipeline | None = None

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
    Console(width=130).print(table(record))
    print(hidden_share(record))
    if option.json:
        Path(option.json).write_text(json.dumps(record, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="eager", choices=[*KINDS], help="of graphpp.compile")
    parser.add_argument("--variants", nargs="*", default=[], choices=[*VARIANTS], help="further pipelines of graphpp")
    parser.add_argument("--offload", type=float, default=0.5, help="the fraction of the saved bytes, of the variant")
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
    """The pipeline that graphpp compiles by these options of `graphpp.compile`, over so many `stages`."""
    tokens, targets = case.batch(device)
    cuts = case.cuts(chosen.pop("stages", STAGES))
    pipe = graphpp.compile(
        case.model(device),
        loss,
        example=graphpp.Microbatch((tokens[: case.rows],), target=targets[: case.rows]),
        split=[f"layers.{layer}" for layer in cuts[1:-1]],
        microbatches=case.microbatches,
        parallel=graphpp.Parallel(device=device),
        **chosen,
    )
    return Step(list(pipe.parameters()), lambda: pipe.step(tokens, target=targets).losses, pipe)


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
    part = Part(model, *case.cuts()[index : index + 2])
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
    first = {"schedule": "Interleaved1F1B", "backend": option.backend}
    chosen = {"graphpp": first, **{name: {**first, **VARIANTS[name](option)} for name in option.variants}}
    makers: dict[str, Callable[[], Step]] = {
        **{name: functools.partial(graphpp_step, case, device, **each) for name, each in chosen.items()},
        "torch": lambda: torch_step(case, device),
        "torch.compile": lambda: compiled_step(case, device, option),
    }
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        began = time.perf_counter()
        steps[name] = make()
        steps[name].losses()
        synchronize(device)
        print(f"{name}: {time.perf_counter() - began:.1f} s to the first step", flush=True)
    return steps


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
        "stages": STAGES,
        "microbatches": case.microbatches,
        "tokens": case.rows * case.length,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "backend": option.backend,
        "compile backend": option.compile_backend,
        "memory": memory,
        "samples": {name: [asdict(sample) for sample in taken] for name, taken in samples.items()},
        "predicted": {name: predicted(step.pipe, case, device) for name, step in steps.items() if step.pipe is not None},
        "graphs": {name: dict(step.pipe.cudagraphs) for name, step in steps.items() if step.pipe is not None},
        "copied": copied(steps["offload"].pipe, device) if "offload" in steps else None,
    }


def predicted(pipe: graphpp.Pipeline, case: Case, device: torch.device) -> dict[str, float]:
    """The seconds of a step by the pipeline's own profile, and the bytes of its plan that a step adds."""
    tokens, targets = case.batch(device)
    for parameter in pipe.parameters():
        parameter.grad = None
    seconds = pipe.profile(tokens, target=targets, repeat=3).predict()
    memory = pipe.plan.memory
    assert memory is not None
    (rank,) = memory.ranks
    return {"seconds": seconds, "bytes": rank.peak - rank.optimizer - rank.buffers - rank.weights}


def copied(pipe: graphpp.Pipeline | None, device: torch.device) -> dict[str, float]:
    """The bytes that a step offloads, and the seconds in which as many are copied to the host and back."""
    assert pipe is not None
    nbytes = sum(window.nbytes for window in pipe.plan.offload_windows)
    size = min(1 << 28, max(nbytes, 1))
    inside = torch.empty(size, dtype=torch.uint8, device=device)
    outside = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        outside.copy_(inside, non_blocking=True)
        inside.copy_(outside, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {"bytes": nbytes, "seconds": statistics.median(seconds) * nbytes / size}


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


if __name__ == "__main__":
    main()
