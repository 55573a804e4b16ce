"""Time `graphpp.plan` for published models on hundreds of H100s, from one process and on the meta device.

    python benchmarks/plan_time.py [--only NAME ...]

Prints the seconds of the model with its capture and costs, and of the search, by the clock and of the processor; and the best
plan. What transformers takes to be imported does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import published
import transformers
from published_runs import read_runs
from rich.console import Console
from rich.table import Table

import graphpp


@dataclass(frozen=True)
class Question:
    """A model of `published/models.json`, machines, and a batch of so many rows of `length` tokens; `most`: seconds that a plan
    may take."""

    model: str
    length: int
    machines: str
    batch: int
    most: int


QUESTIONS = {
    "DeepSeek-V3": Question("DeepSeek-V3", 4096, "1024xH100", 8192, 60),
    "Llama-405B": Question("Llama 3 405B", 8192, "512xH100", 512, 45),
}  # fmt: skip


@contextmanager
def stopped(into: list[float]) -> Iterator[None]:
    """Add the seconds within the context to a list, by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    into += [time.perf_counter() - clock, time.process_time() - processor]


def record(name: str) -> tuple[str, ...]:
    """A line of the table."""
    question, seconds = QUESTIONS[name], list[float]()
    model = next(run.architecture for run in read_runs() if run.model == question.model)
    with stopped(seconds):
        costs = published.costs(model, question.length, None)
    with stopped(seconds):
        found = graphpp.plan(costs, machines=question.machines, batch=question.batch)
    together, best = seconds[0] + seconds[2], found.best
    return (
        name, *(f"{each:.1f}" for each in seconds), f"{together:.1f} of {question.most}",
        f"{len(found)} of {found.considered:,}",
        f"{best.step_seconds:.2f} s, MFU {best.mfu:.1%}: {best.setting}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(QUESTIONS))
    option = parser.parse_args()
    assert transformers.LlamaForCausalLM and transformers.DeepseekV3ForCausalLM  # loaded when they are asked for
    table = Table("model", "capture", "processor", "search", "processor", "together", "simulated", "best step")
    for name in option.only or QUESTIONS:
        table.add_row(*record(name))
    Console(width=240).print(table)


if __name__ == "__main__":
    main()
