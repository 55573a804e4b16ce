"""Time `graphpp.simulate` of large tables, and the questions that a simulated step answers.

    python benchmarks/large_tables.py [--counts RANKS STAGES MICROBATCHES]

Interleaved 1F1B; seconds of the processor, and the most memory of the process so far. Every line is the cost on top of the
lines above it: the table, the events, the makespan, one rank's curve of memory, all ranks' bubbles.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.table import Table

import graphpp
from graphpp.schedules import interleaved_1f1b

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", nargs=3, type=int, default=(256, 512, 2048))
    ranks, stages, microbatches = parser.parse_args().counts
    lines = Table("work", "CPU s", "GB at most", title=f"{ranks} ranks, {stages} stages, {microbatches:,} microbatches")

    def timed(name: str, work: Callable[[], T]) -> T:
        begin = time.process_time()
        found = work()
        seconds, most = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines.add_row(name, f"{seconds:.2f}", f"{most / 1e6:.2f}")
        return found

    costs = graphpp.Costs.unit(stages, ranks)
    schedule = timed("the table", lambda: interleaved_1f1b(ranks, stages, microbatches))
    timeline = timed("simulate", lambda: graphpp.simulate(schedule, costs))
    timed("makespan", lambda: timeline.makespan)
    timed("peak bytes of one rank", lambda: timeline.peak_bytes(0))
    timed("bubbles of all ranks", lambda: [timeline.bubble(rank) for rank in range(ranks)])
    Console(width=100).print(lines)


if __name__ == "__main__":
    main()
