"""Time what a step costs for each parameter, beside the work of the operations.

    python benchmarks/parameter_cost.py [--counts 1000 10000]       (10,000: minutes, for the capture)

The model concatenates its parameters, one number each, and sums them: one operation forward, one backward. Microseconds per
parameter (medians of steps in turn, the step's seconds over the number of parameters, one process, one microbatch) of

    eager            model, loss, backward; autograd adds each gradient to its parameter
    pipe.step        the same through `graphpp.compile`
    look             of the step: the look at the state that a capture depends on, of an unchanged model
    changed          the same look after a change: all values are read again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Contender, alternate, medians, start
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphpp
from graphpp.capture.watch.conditions import Watch

PER_MODULE = 2


class Pair(nn.Module):
    """Two numbers, as a layer has a weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))


class Many(nn.Module):
    """The sum of all parameters, times the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(count // PER_MODULE))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat([each for pair in self.pairs for each in (pair.weight, pair.bias)]).sum()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file for the records")
    option = parser.parse_args()
    device = start()
    found = {count: measured(count, option.rounds, device) for count in option.counts}
    table = Table(title="µs per parameter", title_justify="left")
    table.add_column("contender")
    for count in found:
        table.add_column(f"{count:,} parameters", justify="right")
    for name in next(iter(found.values())):
        table.add_row(name, *(f"{micros[name]:.2f}" for micros in found.values()))
    table.add_row("pipe.step - eager", *(f"{micros['pipe.step'] - micros['eager']:.2f}" for micros in found.values()))
    Console().print(table)
    if option.json:
        Path(option.json).write_text(json.dumps(found))


def measured(count: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Microseconds per parameter by contender."""
    model, plain, x = Many(count), Many(count), torch.ones(1)
    pipe = graphpp.compile(model, loss, split=1, microbatches=1, schedule="GPipe")
    watch = Watch(model, loss)

    def changed() -> None:
        plain.pairs[0].training = not plain.pairs[0].training  # pairs[0] of `plain` is watched by `other`
        other.look()

    other = Watch(plain, loss)
    steps: dict[str, Callable[[], object]] = {
        "eager": lambda: loss(plain(x), x).backward(),
        "pipe.step": lambda: pipe.step(x, target=x),
        "look": watch.look,
        "changed": changed,
    }
    for step in steps.values():
        step()
    results = alternate({name: Contender(step) for name, step in steps.items()}, rounds, device)
    return {name: 1e6 * medians(samples).seconds / count for name, samples in results.items()}


if __name__ == "__main__":
    main()
