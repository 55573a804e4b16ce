"""Compare the schedules that `schedule_auto` finds with the optima of small problems, and time the search of a large one.

    python benchmarks/search_gap.py                  all cases, and 64 ranks with 256 microbatches: some minutes
    python benchmarks/search_gap.py --family unit    the cases of one family
    python benchmarks/search_gap.py --above 0.01     list each case whose gap is above 1 %

The cases and their optima are those of `tests/schedules/search/cases.py`. Two gaps are printed:
to the best table that is known, and to the proven lower bound; both are equal where the optimum is proven. In the family
`blocking` sends and receives occupy ranks and have places of their own. Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from rich.console import Console
from rich.table import Table

import graphpp
from graphpp.schedules.table.costs import Costs
from tests.schedules.search.cases import CASES, Case, Known, known

Gap = tuple[float, float, float, Case, Known]
"""Found over the best known table, found over the bound, both less 1; seconds; and of which case."""


def gap(case: Case, best: Known) -> Gap:
    """Search one case."""
    start = time.process_time()
    table = case.search()
    seconds = time.process_time() - start
    end = graphpp.simulate(table, case.costs).makespan
    return end / best.makespan - 1, end / best.bound - 1, seconds, case, best


def by_family(gaps: list[Gap]) -> Table:
    """Cases, proven cases, and both gaps, by family of costs."""
    families = defaultdict[str, list[Gap]](list)
    for each in gaps:
        families[each[3].name.split()[0]].append(each)
    columns = ("costs", "cases", "proven", "to best known: worst", "mean", "above 2 %", "to bound: worst", "mean", "s a case")
    table = Table(*columns, title="schedule_auto against optima and bounds")
    for family, own in families.items():
        best, bound = [each[0] for each in own], [each[1] for each in own]
        proven = sum(each[4].makespan == each[4].bound for each in own)
        over = sum(each > 0.02 for each in best)
        gaps_ = (f"{max(best):.2%}", f"{fmean(best):.2%}", over, f"{max(bound):.2%}", f"{fmean(bound):.2%}")
        table.add_row(*map(str, (family, len(own), proven, *gaps_, f"{fmean(each[2] for each in own):.2f}")))
    return table


def single(gaps: list[Gap], above: float) -> Table:
    """The cases whose gap to the best known table is above a limit."""
    table = Table("case", "to the best known", "best known", "bound", title=f"cases above {above:.1%}")
    for own, _, _, case, best in sorted(gaps, key=lambda each: -each[0]):
        if own > above:
            table.add_row(case.name, f"{own:.2%}", str(best.makespan), str(best.bound))
    return table


def large() -> Table:
    """64 ranks, 2 stages a rank, 256 microbatches: without a cap and under one, and with overlaps."""
    title = "64 ranks, 128 stages, 256 microbatches, F = I = W = 1, messages 0.1"
    table = Table("overlap", "cap", "makespan", "s", title=title)
    for overlap, cap in ((1.0, None), (1.0, 32_000), (0.8, None)):
        costs = replace(Costs.unit(128, 64, send=0.1), overlap=overlap)
        start = time.process_time()
        found = graphpp.schedule_auto(costs, cap, ranks=64, microbatches=256)
        seconds = time.process_time() - start
        table.add_row(f"{overlap:g}", str(cap), f"{graphpp.simulate(found, costs).makespan:.1f}", f"{seconds:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", help="only the cases of one family of costs, and no large problem")
    parser.add_argument("--above", type=float, default=0.02, help="list the cases with a larger gap")
    arguments = parser.parse_args()
    best = known()
    cases = [case for case in CASES if case.name in best]
    chosen = [case for case in cases if arguments.family in (None, case.name.split()[0])]
    if not chosen:
        families = ", ".join(sorted({case.name.split()[0] for case in cases}))
        parser.error(f"--family {arguments.family}: there are no such cases, but cases of {families}")
    gaps = [gap(case, best[case.name]) for case in chosen]
    console = Console(width=140)
    console.print(by_family(gaps))
    console.print(single(gaps, arguments.above))
    if arguments.family is None:
        console.print(large())


if __name__ == "__main__":
    main()
