"""The table of step_time.py: one line per case and backend of graphpp, and the geometric means of the ratios.

A record is the result of `step_time.record`. A ratio above 1 says that graphpp was faster; `limit` is a share, 1 at the
limit. A figure that was not measured is None, and an empty cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness import Sample, median_ratio, medians
from rich.table import Table

Ratios = dict[str, float | None]  # by the name of the contender that graphpp is compared with
TIMES = ("torch", "compiled", "plain", "limit")


def ratios(samples: Mapping[str, Sequence[Sample]], ours: str, bound: float) -> Ratios:
    """The time of each contender divided by that of `ours`; for `limit` also divided by `bound`, the ranks' speed-up."""
    found = {name: median_ratio(samples[name], samples[ours]) if name in samples else None for name in TIMES}
    share = found["limit"]
    return found | {"limit": None if share is None else share / bound}


def means(records: Sequence[Mapping[str, Any]]) -> dict[str, Ratios]:
    """Geometric means, by backend, over the records that have a ratio."""
    return {
        backend: {name: geometric([record["ratios"][backend][name] for record in records]) for name in TIMES}
        for backend in records[0]["backends"]
    }


def geometric(values: Sequence[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Medians, ratios and bounds."""
    first = records[0]
    title = f"{first['ranks']} ranks, {first['device']}, {first['layers']} layers, "
    title += f"{first['microbatches']} microbatches of {first['tokens']} tokens"
    caption = "ms: medians of the slowest rank (limit: / bound); cpu ms, page faults: all ranks; ratios: median over the rounds"
    shown = Table(title=title, title_justify="left", caption=caption)
    for column in ("model", "dim", "schedule", "backend"):
        shown.add_column(column, no_wrap=True)
    for column in ("ms: graphpp", *TIMES, "torch / graphpp", "compiled / graphpp", "of the limit", "speed-up", "bound"):
        shown.add_column(column, justify="right")
    for column in ("cpu ms: graphpp", "torch", "compiled", "faults: graphpp", "torch"):
        shown.add_column(column, justify="right")
    for record in records:
        for backend in record["backends"]:
            shown.add_row(*line(record, backend))
    shown.add_section()
    for backend, mean in means(records).items():
        shown.add_row("mean", "", "geometric", backend, *[""] * (1 + len(TIMES)), *compared(mean))
    return shown


def line(record: Mapping[str, Any], backend: str) -> list[str]:
    """One record as cells."""
    samples = {name: medians(Sample(**sample) for sample in taken) for name, taken in record["samples"].items()}
    order = [samples.get(name) for name in (f"graphpp {backend}", *TIMES)]
    seconds = [None if each is None else 1e3 * each.seconds for each in order]
    if seconds[-1] is not None:
        seconds[-1] /= record["bound"]
    return [
        record["model"],
        str(record["dim"]),
        record["schedule"],
        backend,
        *(spelled(value, ".1f") for value in seconds),
        *compared(record["ratios"][backend]),
        f"{record['bound']:.2f}",
        *(spelled(None if each is None else 1e3 * each.cpu, ".0f") for each in order[:3]),
        *(spelled(None if each is None else each.faults, ".0f") for each in order[:2]),
    ]


def compared(found: Ratios) -> list[str]:
    """Ratios as cells: torch, compiled, limit, plain."""
    limit = found["limit"]
    share = "" if limit is None else f"{100 * limit:.0f} %"
    return [spelled(found["torch"], ".2f"), spelled(found["compiled"], ".2f"), share, spelled(found["plain"], ".2f")]


def spelled(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
