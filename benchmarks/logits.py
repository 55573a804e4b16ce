"""Measure the last stage of a model with many words, with and without `memory.logits_tokens`.

    python benchmarks/logits.py [--words 131072] [--dim 128] [--length 2048] [--tokens 64 256]

A model of an embedding, two feed-forward layers and a head, in float32 in one process: one stage, as the last one of a
pipeline. The contenders differ in `logits_tokens` alone ("all": None) and run in turn. Before timing, losses must agree to
1e-5 and gradients to 1e-4 of their norm.

MiB: the most bytes that a step takes above those before it, by the process's resident memory on a CPU and by torch's
statistics on a GPU; "plan": the same by `pipe.plan.memory` (parameters, and on a CPU the allocator's share, left out). "of
all": the ratio to the contender with all logits; seconds are medians, their ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_step import Step, peak_bytes
from harness import Contender, alternate, median_ratio, medians, resident_bytes, start
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp


class Model(nn.Module):
    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, dim)
        layers = (nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def main() -> None:
    option = options()
    device = start()
    shape = (option.microbatches, option.length)
    tokens, target = (torch.randint(option.words, shape, device=device) for _ in range(2))
    pipes = {"all" if count is None else str(count): pipeline(option, count, device) for count in (None, *option.tokens)}

    def step(pipe: graphpp.Pipeline) -> graphpp.StepResult:
        return pipe.step(tokens, target=target)

    check({name: numbers(pipe, step) for name, pipe in pipes.items()})
    peaks = {name: peak(lambda pipe=pipe: step(pipe), pipe, device) for name, pipe in pipes.items()}  # type: ignore[misc]
    contenders = {name: Contender(lambda pipe=pipe: step(pipe), pipe.zero_grad) for name, pipe in pipes.items()}  # type: ignore[misc]
    samples = alternate(contenders, option.rounds, device)
    table = Table("tokens at a time", "MiB", "of all", "plan, MiB", "of all", "s", "of all")
    record = {}
    for name, pipe in pipes.items():
        assert pipe.plan.memory is not None
        (rank,) = pipe.plan.memory.ranks
        planned, seconds = rank.peak - rank.weights - rank.optimizer, medians(samples[name]).seconds
        record[name] = {"peak": peaks[name], "planned": planned, "seconds": seconds}
        ratio = median_ratio(samples[name], samples["all"])
        share = [each / record["all"][key] for key, each in record[name].items() if key != "seconds"]
        table.add_row(
            name, f"{peaks[name] / 2**20:,.0f}", f"{share[0]:.3f}", f"{planned / 2**20:,.0f}", f"{share[1]:.3f}",
            f"{seconds:.2f}", f"{ratio:.3f}",
        )  # fmt: skip
        record[name]["ratio"] = ratio
    Console(width=110).print(table)
    if option.json:
        Path(option.json).write_text(json.dumps(record, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=131_072)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a microbatch")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="tokens whose logits exist at one time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def pipeline(option: argparse.Namespace, logits_tokens: int | None, device: torch.device) -> graphpp.Pipeline:
    rows = torch.zeros(1, option.length, dtype=torch.int64)
    return graphpp.compile(
        Model(option.words, option.dim), loss, example=graphpp.Microbatch((rows,), target=rows), schedule="1F1B",
        microbatches=option.microbatches, backend=option.backend, parallel=graphpp.Parallel(device=device),
        memory=graphpp.Memory(logits_tokens=logits_tokens, optimizer="sgd"),
    )  # fmt: skip


def numbers(pipe: graphpp.Pipeline, step: Callable[[graphpp.Pipeline], Any]) -> dict[str, Tensor]:
    losses = step(pipe).losses
    found = {"losses": losses, **{fqn: each.grad.clone() for fqn, each in pipe.named_parameters() if each.grad is not None}}
    pipe.zero_grad()
    return found


def check(found: dict[str, dict[str, Tensor]]) -> None:
    """Raise SystemExit if losses or gradients differ by more than rounding."""
    for name, others in found.items():
        for key, value in others.items():
            expected = found["all"][key]
            if (value - expected).norm() > (1e-5 if key == "losses" else 1e-4) * expected.norm():
                raise SystemExit(f"{name} tokens at a time: {key} differs from that of all logits")


def peak(run: Callable[[], Any], pipe: graphpp.Pipeline, device: torch.device) -> int:
    """The most bytes that a step takes above those before it."""
    pipe.zero_grad()
    gc.collect()
    on_gpu = peak_bytes(Step(list(pipe.parameters()), run), device)
    if on_gpu is not None:
        return on_gpu
    before, most, ended = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, resident_bytes() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    ended.set()
    thread.join()
    return most


if __name__ == "__main__":
    main()
