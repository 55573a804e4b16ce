"""Compare the schedules that `schedule_auto` finds with known ones, and time the search.

    python benchmarks/scheduler.py                   all of it, a minute or two
    python benchmarks/scheduler.py --quick           small sizes only
    python benchmarks/scheduler.py --seeds 3         costs drawn from more seeds

First table: unit costs. Each of the zero-bubble authors' schedules, with its makespan and peak ("the bar"; F = I = W = 1
per rank and microbatch, peak in units of one rank's microbatch), against the schedule found within that peak. Where the
authors' generators were not run, the bar is extended: each further microbatch adds 3.
Second table: stages with costs drawn at random (F, I and W drawn apart, messages take time), against the best named schedule
that fits the same bytes: first any number of bytes, then only as many as the most frugal named schedule takes.

Seconds are CPU seconds of one thread; beside other jobs the clock shows more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from random import Random

from rich.console import Console
from rich.table import Table

import graphpp
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

BARS = {
    (4, 8): {
        "1F1B": (33, 4),
        "ZB1P": (27, 4),
        "ZB2P": (27, 8),
        "ZBV": (25.5, 4),
        "V-Half": (26.5, 3),
        "V-Min": (29.5, 2),
    },
    (4, 16): {
        "1F1B": (57, 4),
        "ZB1P": (51, 4),
        "ZB2P": (51, 15),
        "ZBV": (49.5, 4),
        "V-Half": (50.5, 3),
        "V-Min": (53.5, 2),
    },
    (8, 16): {
        "1F1B": (69, 8),
        "ZB1P": (55, 8),
        "ZB2P": (55, 16),
        "ZBV": (51.5, 8),
        "V-Half": (56.5, 5),
        "V-Min": (61.5, 4),
    },
}
V = ("ZBV", "V-Half", "V-Min")


def bars(quick: bool) -> Iterator[tuple[int, int, str, float, int]]:
    """(ranks, microbatches, name, makespan, peak)."""
    for (ranks, microbatches), row in BARS.items():
        for name, (makespan, peak) in row.items():
            yield ranks, microbatches, name, makespan, peak
    if not quick:
        for name, (makespan, peak) in BARS[8, 16].items():
            yield 8, 32, name, makespan + 48, peak


def named(costs: Costs, ranks: int, microbatches: int) -> Iterator[tuple[float, list[int], str]]:
    """(makespan, peak per rank, name) of each schedule with a name that takes these counts."""
    for name, generator in SCHEDULES.items():
        try:
            table = generator(ranks, len(costs.stages), microbatches)
        except ScheduleError:
            continue
        if any(leaf.kind is not Kind.F for _, _, action in table.cells() for leaf in action.leaves):
            yield *measured(table, costs), name


def measured(schedule: Schedule, costs: Costs) -> tuple[float, list[int]]:
    timeline = graphpp.simulate(schedule, costs)
    return timeline.makespan, [timeline.peak_bytes(rank) for rank in range(schedule.ranks)]


def found(costs: Costs, cap: list[int] | None, ranks: int, microbatches: int) -> tuple[float, list[int], float]:
    """(makespan, peaks, seconds)."""
    start = time.process_time()
    schedule = graphpp.schedule_auto(costs, cap, ranks=ranks, microbatches=microbatches)
    seconds = time.process_time() - start
    return *measured(schedule, costs), seconds


def drawn(seed: int, stages: int) -> Costs:
    random = Random(seed)

    def stage() -> StageCosts:
        saved = random.randint(700, 1300)
        return StageCosts(
            random.uniform(0.5, 1.5),
            random.uniform(0.5, 2),
            random.uniform(0.3, 1.5),
            saved_bytes=saved,
            kept_bytes=saved // 2,
        )

    sends = tuple(random.uniform(0, 0.3) for _ in range(stages - 1))
    return Costs(tuple(stage() for _ in range(stages)), sends, sends)


def unit_costs(quick: bool) -> Table:
    columns = ("ranks", "microbatches", "bar", "its makespan", "peak", "found", "peak found", "seconds")
    table = Table(*columns, title="unit costs, within the peak of the bar")
    for ranks, microbatches, name, makespan, peak in bars(quick):
        costs = Costs.unit(ranks * (2 if name in V else 1), ranks)
        end, peaks, seconds = found(costs, [1000 * peak] * ranks, ranks, microbatches)
        mark = "" if end <= makespan + 1e-9 else " ABOVE"
        cells = (
            ranks,
            microbatches,
            name,
            makespan,
            peak,
            f"{end:g}{mark}",
            f"{max(peaks) / 1000:g}",
            f"{seconds:.2f}",
        )
        table.add_row(*map(str, cells))
    return table


def uneven_costs(quick: bool, seeds: int) -> Table:
    columns = (
        "ranks",
        "microbatches",
        "stages",
        "seed",
        "memory",
        "best named",
        "its makespan",
        "found",
        "named/found",
        "s",
    )
    table = Table(*columns, title="costs drawn at random, within the same bytes")
    sizes = [(2, 4, 4), (4, 8, 8), (4, 4, 16)] + ([] if quick else [(3, 6, 7), (6, 12, 12), (8, 8, 16), (8, 16, 32)])
    for ranks, stages, microbatches in sizes:
        for seed in range(seeds):
            costs = drawn(seed, stages)
            others = sorted(named(costs, ranks, microbatches))
            for cap in (None, max(min(others, key=lambda each: max(each[1]))[1])):
                end, _, seconds = found(costs, None if cap is None else [cap] * ranks, ranks, microbatches)
                best = next(each for each in others if cap is None or max(each[1]) <= cap)
                memory = "any" if cap is None else f"{cap}"
                row = (ranks, microbatches, stages, seed, memory, best[2], f"{best[0]:.2f}", f"{end:.2f}")
                table.add_row(*map(str, row), f"{best[0] / end:.3f}", f"{seconds:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--seeds", type=int, default=2, help="how many drawings of costs per size")
    arguments = parser.parse_args()
    console = Console(width=140)
    console.print(unit_costs(arguments.quick))
    console.print(uneven_costs(arguments.quick, arguments.seeds))


if __name__ == "__main__":
    main()
