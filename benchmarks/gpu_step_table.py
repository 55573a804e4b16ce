"""The tables of gpu_step.py: what a record of its measurements shows.

Contract: a record is the data that `gpu_step.py --json` writes; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import Sample, median_ratio, medians
from rich.table import Table


def table(record: Mapping[str, Any]) -> Table:
    """A line for each contender: its time, ratios to the others, its bytes, and how far off its predictions are."""
    title = f"{record['parameters'] / 1e6:.1f} M parameters in {record['dtype']}, {record['stages']} local stages, "
    title += f"{record['microbatches']} microbatches of {record['tokens']} tokens, {record['device']}, "
    title += f"torch {record['torch']}, backend {record['backend']}"
    caption = "torch / it, it / torch.compile: medians over the rounds. predicted: over measured, less 1"
    shown = Table(title=title, title_justify="left", caption=caption)
    for column in ("", "ms", "cpu ms", "torch / it", "it / torch.compile", "predicted ms", "MiB", "predicted MiB"):
        shown.add_column(column, justify="right" if column else "left")
    samples = {name: [Sample(**sample) for sample in taken] for name, taken in record["samples"].items()}
    for name, taken in samples.items():
        middle, memory, own = medians(taken), record["memory"][name], record["predicted"].get(name)
        ratios = (median_ratio(samples["torch"], taken), median_ratio(taken, samples["torch.compile"]))
        cells = [f"{1e3 * middle.seconds:.1f}", f"{1e3 * middle.cpu:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        cells.append("" if own is None else f"{own['seconds'] / middle.seconds - 1:+.1%}")
        cells.append("-" if memory is None else f"{memory / 2**20:.0f}")
        cells.append("" if own is None or memory is None else f"{own['bytes'] / memory - 1:+.1%}")
        shown.add_row(name, *cells)
    return shown


def hidden_share(record: Mapping[str, Any]) -> str:
    """A line with the share of the offloading copies that a step hides."""
    samples = {name: [Sample(**sample) for sample in taken] for name, taken in record["samples"].items()}
    if not {"looped", "offload"} <= samples.keys():
        return "offload: not measured, for it takes the variants looped and offload"
    more = medians(samples["offload"]).seconds - medians(samples["looped"]).seconds
    nbytes, seconds = record["copied"]["bytes"], record["copied"]["seconds"]
    if not nbytes:
        return "offload: no value is offloaded"
    return f"offload: {nbytes / 2**20:.0f} MiB to the host and back in {1e3 * seconds:.1f} ms, {1 - more / seconds:.1%} hidden"
