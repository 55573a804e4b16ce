"""Write the pages of models from data: docs/models.md and docs/models/cuts.md from benchmarks/tried/, and
docs/planner/published_runs.md from benchmarks/published/.

    python benchmarks/model_pages.py

`make models` runs the models before. tests/test_published_runs.py compares the pages with the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from model_cards import Card, read_cards
from published_runs import Run, read_runs
from run_files import AnyRun

DOCS = Path(__file__).parents[1] / "docs"
R = TypeVar("R", bound=AnyRun)


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    cards, runs = read_cards(), read_runs()
    made = {"models.md": models_page(cards), "models/cuts.md": cuts_page(cards)}
    made["planner/published_runs.md"] = published_page(runs)
    return {path: "\n".join(lines) + "\n" for path, lines in made.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def by_model(runs: Iterable[R]) -> Mapping[tuple[str, str], list[R]]:
    """The runs of each group and model, in order."""
    found: dict[tuple[str, str], list[R]] = {}
    for run in runs:
        found.setdefault((run.group, run.model), []).append(run)
    return found


# --------------------------------------------------------------------------------------------------------- models tried


def models_page(cards: Sequence[Card]) -> Iterator[str]:
    first, models, letters = cards[0], by_model(cards).values(), reasons(cards)
    it, machine, source = first.settings, first.machines, first.source
    yield f"""# Models

<!-- Written by `make models` from benchmarks/tried: edit benchmarks/model_pages.py, not this page. -->

Unmodified models of other packages, in small configurations with random weights (`tests/zoo/models.py`), trained by graphpp and
by plain PyTorch. Date {source.date}, command `{first.command}`, torch {first.torch}; {machine.ranks} ranks on one
{machine.device}, {machine.threads} thread each, over {it.backend}; {it.precision}; {it.steps} steps of {it.batch} rows in
{it.microbatches} microbatches. Tolerance of a gradient: {first.result.tolerance:.0e}.
"""
    yield from table(
        ("model", "class", "package", "parameters", "tied", "cuts", "to uncut", "to eager", "why"),
        (model_row(each, letters) for each in models),
    )
    yield """
The results compare losses, all gradients and buffers of a step with the uncut joint graph in one process, and with a plain loop
over the same microbatches. A number is the largest relative error (2-norm) of a gradient, over all cuts of the model.
[Each cut](models/cuts.md) has stages, schedule, bytes and results of its own.

## Why not bit-equal
"""
    for why, letter in letters.items():
        yield f"- **{letter}**: {why}."
    yield """
Ranks and schedules of other kinds, sizes that change and backends are tried in `tests/zoo/`; `make test-all` runs them.
[`graphpp.verify`](debugging/verify.md) makes the same comparison with your own model.
"""[:-1]


ADDED = "several stages add to the gradient of one parameter (tied, or used in several layers), so the sum has another order"


def reasons(cards: Iterable[Card]) -> dict[str, str]:
    """The reasons of all models, each with the letter under which the page has it."""
    given = [card.architecture.why for card in cards if card.architecture.why]
    return {why: "ABCDEFGH"[at] for at, why in enumerate([ADDED, *dict.fromkeys(given)])}


def model_row(cards: Sequence[Card], letters: Mapping[str, str]) -> tuple[str, ...]:
    model, results = cards[0].architecture, [card.result for card in cards]
    given = [ADDED if any(result.uncut for result in results) else "", model.why]
    why = [letters[each] for each in given if each]
    return (
        cards[0].model, f"`{model.class_name}`", f"{model.package} {model.version}", f"{model.parameters:,}",
        ", ".join(f"`{name}`" for name in model.tied), str(len(cards)),
        shown(max(result.uncut for result in results)), shown(max(result.eager for result in results)), ", ".join(why),
    )  # fmt: skip


def shown(error: float) -> str:
    return f"{error:.1e}" if error else "bit-equal"


def cuts_page(cards: Sequence[Card]) -> Iterator[str]:
    yield f"""# Models, cut by cut

<!-- Written by `make models` from benchmarks/tried: edit benchmarks/model_pages.py, not this page. -->

Each row is one cut of a model of [Models](../models.md), where versions, machine and the meaning of the results stand. Date
{cards[0].source.date}, command `{cards[0].command}`. "Cut before": the modules at which stages start, or the argument
`split=`. Bytes are those of one microbatch over each boundary, in order; gradients have as many, unless the row says both.
A star: how many parameters have gradients to which several stages add.
"""
    head = ("model", "stages", "cut before", "schedule", "bytes over each boundary", "to uncut", "to eager")
    yield from table(head, map(cut_row, cards))


def cut_row(card: Card) -> tuple[str, ...]:
    it, result = card.settings, card.result
    cut = f"split={it.split}" if isinstance(it.split, int) else ", ".join(f"`{name}`" for name in it.split)
    both = zip(result.forward, result.backward, strict=True)
    sent = [f"{on:,}" if on == back else f"{on:,} / {back:,}" for on, back in both]
    added = f" ({result.added}*)" if result.added else ""
    errors = (f"{shown(error)}{added if error else ''}" for error in (result.uncut, result.eager))
    return (card.model, str(it.count), cut, it.schedule, " · ".join(sent), *errors)


# ------------------------------------------------------------------------------------------------------- published runs


def published_page(runs: Sequence[Run]) -> Iterator[str]:
    groups = by_model(runs)
    numbers = {title: number for number, title in enumerate(dict.fromkeys(run.source.title for run in runs), 1)}
    yield f"""# Published runs

<!-- Written by `make models` from benchmarks/published: edit benchmarks/model_pages.py, not this page. -->

The {len(runs)} runs of `benchmarks/published/`, by source and model: trainings that others measured, beside which
[the planner's predictions](published.md) stand. These runs have the fields of [the models tried](../models.md): model,
machines, layout, schedule, result. `python benchmarks/published.py --group` prices the runs. Each run's file also has kernels,
recomputation, and the assumptions where the source is silent.
"""
    head = ("model", "parameters", "runs", "GPUs", "layout", "schedule", "precision", "tokens per second and GPU", "source")
    yield from table(head, (published_row(each, numbers) for each in groups.values()))
    yield """
A layout has the largest degrees over the runs of a row. Tokens per second follow from the figure that was published: tokens,
seconds, TFLOP/s or MFU.

## Sources

A star: the figures were read in a list or a copy of the page's table, not on the page itself.
"""
    for title, number in numbers.items():
        source = next(run.source for run in runs if run.source.title == title)
        star = "" if source.seen == "page" else " \\*"
        where = f"[{title}]({source.where})" if source.where.startswith("https://") and " " not in source.where else title
        arxiv = f", {source.where}" if source.where.startswith("arXiv") else ""
        yield f"{number}. {where}{arxiv}, {source.date}{star}"


def published_row(runs: Sequence[Run], numbers: Mapping[str, int]) -> tuple[str, ...]:
    first = runs[0]
    devices = dict.fromkeys(run.machines.device for run in runs)
    gpus = [span([run.machines.gpus for run in runs if run.machines.device == device]) + f" {device}" for device in devices]
    degrees = {name: max(getattr(run.settings, name) for run in runs) for name in ("dp", "tp", "pp", "cp", "ep")}
    rates = [round(run.tokens) for run in runs if run.tokens is not None]
    words = [sorted({getattr(run.settings, name) for run in runs}) for name in ("schedule", "precision")]
    name = first.model.partition(",")[0].removesuffix(" of zero bubble")
    return (
        name, f"{first.architecture.parameters(first.settings.length) / 1e9:,.1f} B", str(len(runs)),
        ", ".join(gpus), " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1),
        *map(", ".join, words), span(rates), ", ".join(sorted({str(numbers[run.source.title]) for run in runs})),
    )  # fmt: skip


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main() -> None:
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text)
        print(f"wrote docs/{path}")


if __name__ == "__main__":
    main()
