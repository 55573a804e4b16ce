"""`python -m tests.zoo`: run every model of the zoo and write docs/models.md."""

import os
import warnings
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from tests.distributed import close_workers
from tests.zoo.models import ROWS, ZOO, Entry
from tests.zoo.running import MICROBATCHES, RANKS, STEPS, Run, Visit, different, error, run_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = (
    "model", "class", "library", "parameters", "tied", "stages", "cut before", "schedule",
    "bytes over each boundary, forward / backward", "to uncut", "to eager",
)  # fmt: skip


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(1)
    try:
        DOCUMENT.write_text(document())
    finally:
        close_workers()
    print(f"wrote {DOCUMENT.relative_to(DOCUMENT.parents[1])}")


def document() -> str:
    rows = [row for name, entry in ZOO.items() for row in rows_of(entry, run_model(name))]
    return "\n".join([head(), line(COLUMNS), line(["---"] * len(COLUMNS)), *map(line, rows), "", *reasons(), ""])


def head() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft"))
    return f"""# Models

Written by `make models` on {datetime.now(UTC):%Y-%m-%d} with {versions}; CPU, fp32, gloo.

Small configurations with random weights of unmodified models (`tests/zoo/models.py`), {STEPS} steps of {ROWS} rows in
{MICROBATCHES} microbatches on {RANKS} ranks. A row is one cut. Bytes are per microbatch, boundaries in order. The results
compare losses, all gradients and buffers: with the uncut joint graph in one process, and with a plain eager loop over
the same microbatches. A number is the largest relative error (2-norm) of a gradient. A tied parameter is one that the
model holds under several names; one whose gradient several stages make (`*`: how many) is summed in another order.
"""


def rows_of(entry: Entry, visit: Visit) -> list[list[str]]:
    model = entry.model()
    count = sum(parameter.numel() for parameter in model.parameters())
    about = [entry.title, f"`{type(model).__name__}`", entry.library, f"{count:,}", tied(model)]
    return [[*about, *columns(run, visit)] for run in visit.cut]


def tied(model: torch.nn.Module) -> str:
    """The names that mean a parameter with another name."""
    first = {fqn for fqn, _ in model.named_parameters()}
    return ", ".join(f"`{fqn}`" for fqn, _ in model.named_parameters(remove_duplicate=False) if fqn not in first)


def columns(run: Run, visit: Visit) -> list[str]:
    sent = " · ".join(f"{forward:,} / {backward:,}" for forward, backward in run.crossing)
    cut = run.name if run.name.startswith("split=") else ", ".join(f"`{name}`" for name in run.name.split(", "))
    return [str(run.stages), cut, run.schedule, sent, result(run, visit.uncut), result(run, visit.eager)]


def result(run: Run, other: Run) -> str:
    if not different(run, other):
        return "bit-equal"
    shared = f" ({len(run.shared)}*)" if run.shared else ""
    return f"{error(run, other):.1e}{shared}"


def reasons() -> list[str]:
    return ["## Why not bit-equal to eager", "", *(f"- {e.title}: {e.inexact}." for e in ZOO.values() if e.inexact)]


def line(cells: object) -> str:
    return f"| {' | '.join(cells)} |"  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
