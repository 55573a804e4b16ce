"""On GPUs over NCCL, compare a step of graphpp with torch.distributed.pipelining on the same ranks.

    torchrun --nproc-per-node 2 benchmarks/nccl.py [--microbatches 8 16]    a Llama of 1.1 billion parameters in bfloat16
    torchrun --nproc-per-node 2 benchmarks/nccl.py --small                  the same code at tiny sizes, also over gloo on a CPU

Ranks share GPU 0 where there are more ranks than GPUs, NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Their
kernels run at the same time only under CUDA MPS. There a ratio of two contenders holds; seconds say nothing about ranks that
have a GPU each.

Contenders run the same model, weights, microbatches and 1F1B with a stage on each rank, in turn:

    graphpp             by the Inductor backend; "graphpp, eager" by the eager one
    torch, compiled     torch's PipelineStage and Schedule1F1B, the module of each stage under torch.compile
    torch, eager        the same without torch.compile

A step is forward and backward of all microbatches into fresh `param.grad`; no optimizer. Before timing, the losses must agree
to 2 % (bfloat16; 0.01 % in float32). Afterwards a profile of one step of the first contender gives three figures for each
rank: the share of the step in which the rank's other kernels run than NCCL's ("computes"), the share in which NCCL's kernels
run alone, so that the rank waits for a message ("waits"), and the share of the time of NCCL's kernels in which other kernels
of the rank run.

`host` is the time in which the host issues one action with messages, of programs that return their inputs (empty_stages.py);
the host does not wait for the GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Step, check_losses
from empty_stages import STAGES, empty_program
from gpu_step import Case
from harness import RANK, RANKS, Contender, alternate, median_ratio, medians, over_ranks, start, synchronize
from models import Part, llama_1b, llama_small, loss
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile

import graphpp
from graphpp.parallel.rank_place import RankPlace
from graphpp.parallel.transport import connect
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.generate import names as schedules
from graphpp.schedules.rewrite.add_send_recv import add_send_recv

Interval = tuple[float, float]


def main() -> None:
    option = options()
    device = start()
    records = []
    for count in option.microbatches:
        small = Case(llama_small(64, layers=2 * RANKS), torch.float32, count, option.rows, 16)
        case = small if option.small else Case(llama_1b(), torch.bfloat16, count, option.rows, option.length)
        records.append(measured(case, option, device))
        if RANK == 0:
            Console(width=150).print(table(records[-1]))
    host = host_time(device)
    if RANK == 0:
        print(f"host: {host * 1e6:.1f} us an action", flush=True)
        if option.json:
            Path(option.json).write_text(json.dumps({"records": records, "host": host}, indent=1))
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model in float32")
    parser.add_argument("--backend", default="inductor", choices=["eager", "inductor"], help="of the first contender")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile")
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------- contenders


def graphpp_step(case: Case, backend: str, device: torch.device) -> Step:
    tokens, targets = case.batch(device)
    pipe = graphpp.compile(
        case.model(device),
        loss,
        example=graphpp.Microbatch((tokens[: case.rows],), target=targets[: case.rows]),
        split=[f"layers.{layer}" for layer in case.cuts(RANKS)[1:-1]],
        schedule="1F1B",
        microbatches=case.microbatches,
        backend=backend,
        parallel=graphpp.Parallel(device=device),
    )
    return Step(list(pipe.parameters()), lambda: pipe.step(tokens, target=targets).losses, tolerance(case))


def torch_step(case: Case, backend: str | None, device: torch.device) -> Step:
    """torch.distributed.pipelining with the shapes given, so that no probe run finds them; outputs are not merged."""
    part = Part(case.model(device), *case.cuts(RANKS)[RANK : RANK + 2])
    tokens, targets = case.batch(device)
    hidden = torch.empty(case.rows, case.length, case.config.dim, dtype=case.dtype, device=device)
    logits = torch.empty(case.rows, case.length, case.config.vocab, dtype=case.dtype, device=device)
    first, last = RANK == 0, RANK == RANKS - 1
    into = tokens[: case.rows].clone() if first else hidden.clone().requires_grad_()
    out = (logits if last else hidden).requires_grad_()
    module = part if backend is None else torch.compile(part, dynamic=False, fullgraph=True, backend=backend)
    stage = PipelineStage(module, RANK, RANKS, device, input_args=(into,), output_args=(out,))
    runner = Schedule1F1B(stage, case.microbatches, loss_fn=loss)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runner.step(*((tokens,) if first else ()), return_outputs=False, **given)
        return torch.stack([value.detach().float() for value in losses]) if last else None

    return Step(list(part.parameters()), step, tolerance(case))


def tolerance(case: Case) -> float:
    """Of losses, relative."""
    return 1e-4 if case.dtype is torch.float32 else 2e-2


def steps_of(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Step]:
    """All contenders by name."""
    torch.compiler.reset()
    makers: dict[str, Callable[[], Step]] = {
        "graphpp": lambda: graphpp_step(case, option.backend, device),
        "graphpp, eager": lambda: graphpp_step(case, "eager", device),
        "torch, compiled": lambda: torch_step(case, option.compile_backend, device),
        "torch, eager": lambda: torch_step(case, None, device),
    }
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        began = time.perf_counter()
        steps[name] = make()
        steps[name].losses()
        steps[name].forget_gradients()
        synchronize(device)
        if RANK == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s to the end of the first step", flush=True)
    return steps


# --------------------------------------------------------------------------------------------------------- measurement


def measured(case: Case, option: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time all contenders in turn, and profile a step of the first."""
    steps = steps_of(case, option, device)
    check_losses(steps["torch, eager"], steps, device)
    timed = {name: Contender(step.losses, step.forget_gradients) for name, step in steps.items()}
    alternate(timed, 2, device)
    samples = alternate(timed, option.rounds, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name, "ranks": RANKS, "microbatches": case.microbatches, "torch": torch.__version__,
        "seconds": {each: medians(taken).seconds for each, taken in samples.items()},
        "ratios": {each: median_ratio(taken, samples["graphpp"]) for each, taken in samples.items()},
        "overlap": over_ranks(list(overlap(steps["graphpp"], device).values())),
        "samples": {each: [sample.seconds for sample in taken] for each, taken in samples.items()},
    }  # fmt: skip


def overlap(step: Step, device: torch.device) -> dict[str, float]:
    """Shares of a step of this rank: compute kernels, NCCL's kernels alone; and of NCCL's kernels, the share beside others."""
    step.forget_gradients()
    synchronize(device)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if device.type == "cuda" else None) as recorded:
        began = time.perf_counter()
        step.losses()
        synchronize(device)
        whole = (time.perf_counter() - began) * 1e6
    spans: dict[bool, list[Interval]] = {False: [], True: []}
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    compute, messages = length(spans[False]), length(spans[True])
    alone = length([*spans[False], *spans[True]]) - compute
    return {"compute": compute / whole, "waits": alone / whole, "beside": 1 - alone / messages if messages else 0.0}


def length(spans: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def host_time(device: torch.device, repeats: int = 20) -> float:
    """Seconds of the slowest rank's host for an action of interleaved 1F1B with messages and nothing to compute."""
    table = add_send_recv(schedules.interleaved_1f1b(RANKS, STAGES, 32))
    connect(dist.group.WORLD)
    runner = GraphPPRunner(empty_program(), table, ModelState(nn.Module()), RankPlace(device, dist.group.WORLD))
    inputs, seeds = [{"args[0]": torch.ones(1, device=device)}] * 32, [torch.ones((), device=device)] * 32
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        runner.step(inputs, seeds)
        seconds.append(time.perf_counter() - began)
    actions = max(len(list(filter(None, row))) for row in table.table)
    return max(own[0] for own in over_ranks([sorted(seconds)[repeats // 2]])) / actions


def table(record: Mapping[str, Any]) -> Table:
    title = f"{record['device']}, {record['ranks']} ranks, {record['microbatches']} microbatches"
    found = Table("", "ms", "over graphpp", title=title)
    for name, seconds in record["seconds"].items():
        found.add_row(name, f"{seconds * 1e3:.1f}", f"{record['ratios'][name]:.3f}")
    for rank, (compute, waits, beside) in enumerate(record["overlap"]):
        found.add_row(f"rank {rank}", f"computes {compute:.0%}, waits {waits:.0%}", f"messages beside kernels {beside:.0%}")
    return found


if __name__ == "__main__":
    main()
