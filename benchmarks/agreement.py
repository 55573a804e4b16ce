"""Time the agreement of all ranks before a call, beside the collectives that it could be made of.

    torchrun --nproc-per-node 16 benchmarks/agreement.py

Milliseconds of the slowest rank, and CPU milliseconds of all ranks together divided by their number (medians of calls in turn):

    compare      `Agreement.compare` of facts that are equal on all ranks
    all_reduce   one all-reduce of 72 bytes
    all_gather   one all-gather of 16 bytes, which is a ring on gloo
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, alternate, medians, start
from rich.console import Console
from rich.table import Table

from graphpp.parallel.agreement import Agreement
from graphpp.parallel.facts import Facts

CALLS = 20  # in a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    option = parser.parse_args()
    device = start()
    agreement, facts = Agreement(dist.group.WORLD, device), Facts({"the call": ["step"]}, {"args[0]": 1})
    words, digest = torch.zeros(9, dtype=torch.int64), torch.zeros(16, dtype=torch.uint8)
    received = [torch.empty_like(digest) for _ in range(RANKS)]
    calls = {
        "compare": lambda: agreement.compare(facts),
        "all_reduce": lambda: dist.all_reduce(words, dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather(received, digest),
    }

    def repeated(call: object) -> None:
        for _ in range(CALLS):
            call()  # type: ignore[operator]

    contenders = {name: Contender(lambda call=call: repeated(call), everywhere=True) for name, call in calls.items()}
    table = Table(title=f"{RANKS} ranks, ms a call", title_justify="left")
    for name in ("", "slowest rank", "CPU of a rank"):
        table.add_column(name, justify="right")
    for name, samples in alternate(contenders, option.rounds, device).items():
        median = medians(samples)
        table.add_row(name, f"{1e3 * median.seconds / CALLS:.2f}", f"{1e3 * median.cpu / CALLS / RANKS:.3f}")
    if RANK == 0:
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
