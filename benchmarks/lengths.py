"""Many lengths of a batch in turn: captures, the first step of each length, and later steps against graphs for one length each.

    torchrun --nproc-per-node 2 benchmarks/lengths.py [--dim 256] [--layers 8] [--lengths 20] [--rounds 5] [--backend eager]

Contract: a Llama is trained on one stage per rank, on rows of many lengths. The pipeline `open` has the default options; the
pipeline `single` captures each length by itself (`Debug(dynamic=False)`) and keeps all graphs. Steps of both are timed in
turn, length after length: the mean over lengths of the least time of `open`, over that of `single`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, alternate, start
from models import llama_small, loss, new_llama

import graphpp
from graphpp.compiler import capture_once

ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    option = parser.parse_args()
    device = start()
    captured = count_captures()
    lengths = [16 + 12 * (7 * at % option.lengths) for at in range(option.lengths)]
    vocab = llama_small(option.dim).vocab
    batches = [torch.randint(0, vocab, (2 * ROWS, length), device=device) for length in lengths]
    pipes = {"open": pipeline(option, device, None)}
    if option.backend == "eager":
        pipes["single"] = pipeline(option, device, False)
    for name, pipe in pipes.items():
        before = len(captured)
        times = " ".join(f"{1000 * seconds:.0f}" for seconds in first_steps(pipe, batches))
        if RANK == 0:
            print(f"{name}: {len(captured) - before} captures for {len(lengths)} lengths; ms of first steps: {times}")
    report(later_steps(pipes, batches, option.rounds, device))
    if RANKS > 1:
        dist.destroy_process_group()


def pipeline(option: argparse.Namespace, device: torch.device, dynamic: bool | None) -> graphpp.Pipeline:
    """A pipeline with one stage per rank, at least two."""
    return graphpp.compile(
        new_llama(llama_small(option.dim, option.layers), device),
        loss,
        split=max(RANKS, 2),
        microbatches=2,
        backend=option.backend,
        debug=graphpp.Debug(dynamic=dynamic, max_graphs=option.lengths + 1),
    )


def first_steps(pipe: graphpp.Pipeline, batches: Sequence[torch.Tensor]) -> Iterator[float]:
    """Seconds of the first step of each batch."""
    for tokens in batches:
        began = time.perf_counter()
        pipe.step(tokens, target=tokens)
        yield time.perf_counter() - began


def later_steps(
    pipes: Mapping[str, graphpp.Pipeline], batches: Sequence[torch.Tensor], rounds: int, device: torch.device
) -> dict[str, float]:
    """The mean over batches of the least seconds of a step, by pipeline."""
    best = dict.fromkeys(pipes, 0.0)
    for tokens in batches:
        steps = {name: Contender(partial(pipe.step, tokens, target=tokens)) for name, pipe in pipes.items()}
        for name, samples in alternate(steps, rounds, device).items():
            best[name] += min(sample.seconds for sample in samples) / len(batches)
    return best


def report(best: Mapping[str, float]) -> None:
    """Print the later steps on rank 0."""
    if RANK == 0:
        print("later steps: " + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in best.items()))
        if "single" in best:
            print(f"open over single: {best['open'] / best['single']:.3f}")


def count_captures() -> list[int]:
    """A list that grows with each capture of this process."""
    found: list[int] = []
    original = capture_once.capture

    def counting(*args: object, **options: object) -> object:
        found.append(1)
        return original(*args, **options)  # type: ignore[arg-type]

    capture_once.capture = counting  # type: ignore[assignment]
    return found


if __name__ == "__main__":
    main()
