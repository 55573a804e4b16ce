"""Time the checker on large tables: the rules on arrays beside the rules action by action, in turn, in one process.

    python benchmarks/check_tables.py [--schedule Interleaved1F1B] [--sizes 16x32x128 64x128x512] [--rounds 3] [--arrays-only]

For each size (ranks x stages x microbatches) the table with its messages: cells, CPU seconds to make it, the median CPU
microseconds a cell of either way, their ratio, and the peak memory of the process afterwards. --arrays-only leaves out the
rules action by action.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from graphpp.schedules.check.checker import find_fault
from graphpp.schedules.check.schedule_under_check import ScheduleUnderCheck
from graphpp.schedules.check.vectorized import is_valid
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.schedule import Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="Interleaved1F1B")
    parser.add_argument("--sizes", nargs="+", default=["16x32x128", "64x128x512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arrays-only", action="store_true")
    option = parser.parse_args()
    shown = Table("ranks x stages x microbatches", "cells", "make s", "arrays µs", "by action µs", "ratio", "peak MiB")
    for size in option.sizes:
        ranks, stages, microbatches = map(int, size.split("x"))
        start = time.process_time()
        table = add_send_recv(make_table(option.schedule, ranks, stages, microbatches))
        seconds = time.process_time() - start
        cells = sum(1 for _ in table.cells())
        fast, slow = measured(table, stages, microbatches, option.rounds, arrays_only=option.arrays_only)
        ratio = f"{slow / fast:.1f}" if slow else "-"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        each = [f"{1e6 * value / cells:.2f}" if value else "-" for value in (fast, slow)]
        shown.add_row(size, f"{cells:,}", f"{seconds:.2f}", *each, ratio, f"{peak:,}")
    Console(width=140).print(shown)


def measured(table: Schedule, stages: int, microbatches: int, rounds: int, *, arrays_only: bool) -> tuple[float, float]:
    """Median CPU seconds of the rules on arrays, and of the rules action by action (0.0 if left out)."""

    def on_arrays() -> None:
        if not is_valid(table, stages, microbatches, training=True):
            raise AssertionError(f"{table!r} is a right table, but the rules on arrays do not show it")

    ways = [on_arrays] if arrays_only else [on_arrays, lambda: find_fault(ScheduleUnderCheck(table, stages, microbatches))]
    taken = [[cpu_seconds(way) for way in ways] for _ in range(rounds)]
    medians = [statistics.median(each) for each in zip(*taken, strict=True)]
    return medians[0], medians[1] if len(medians) > 1 else 0.0


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this process that one call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
