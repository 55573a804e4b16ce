"""`graphpp verify MODEL`: one step run as stage programs, as the uncut joint graph and in eager, in this process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphpp.cli import forms
from graphpp.cli.command import Answer, add_command
from graphpp.cli.schedule_inputs import SCHEDULE_HELP, complete_name, read_schedule
from graphpp.cli.simulated import facts_of

if TYPE_CHECKING:
    from graphpp.verification.report import Comparison, Verification

MODEL_HELP = (
    "package.module:function or path/to/file.py:function, without arguments, that returns (model, loss, example); "
    "or a folder with a Hugging Face config.json."
)


def add_to(root: typer.Typer) -> None:
    add_command(root, "verify")(verify)


def verify(  # noqa: PLR0913 - the options of a pipeline
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    split: Annotated[str | None, typer.Option(help=forms.SPLIT_HELP)] = None,
    schedule: Annotated[str, typer.Option(help=SCHEDULE_HELP, autocompletion=complete_name)] = "auto",
    microbatches: Annotated[int | None, typer.Option(min=1, help="How many microbatches a step has.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="For how many ranks the schedule is.")] = None,
    memory: Annotated[str | None, typer.Option(help=forms.MEMORY_HELP)] = None,
    cap: Annotated[str | None, typer.Option(help="Bytes that a rank may hold at one time, e.g. 8GiB.")] = None,
    backend: Annotated[Literal["eager", "inductor"], typer.Option(help="Who runs the operations.")] = "eager",
    whole_batch: Annotated[
        bool, typer.Option("--whole-batch", help="The example is a whole batch: compare a step over it as well.")
    ] = False,
    tolerance: Annotated[float | None, typer.Option(help="The relative difference that counts as rounding.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of the random tokens for a Hugging Face model.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in each of these rows.")] = None,
    dump: Annotated[Path | None, typer.Option(help="A folder for the graphs, as Python that runs.")] = None,
) -> Answer:
    """Check that the pipeline of a model computes what plain PyTorch computes. Exit code 1 where they differ."""
    from graphpp import api  # these load torch, which help pages do not need
    from graphpp.cli.models import load_model

    options = {
        "split": forms.read_split(split),
        "schedule": read_schedule(schedule),
        "memory": forms.read_memory(memory, cap),
        "debug": dump,
    }
    loaded = load_model(model, rows=batch, length=length)
    found = api.verify(
        loaded.model,
        loaded.loss,
        loaded.example,
        microbatches=microbatches,
        ranks=ranks,
        backend=backend,
        tolerance=tolerance,
        against="whole batch" if whole_batch else "microbatches",
        **options,  # type: ignore[arg-type]  # forms made by readers
    )
    return Answer(str(found), _document(found), found.ok)


def _document(found: Verification) -> dict[str, object]:
    comparisons = {"cut": found.cut, "eager": found.eager, "whole_batch": found.whole_batch}
    return {
        "ok": found.ok,
        "tolerance": found.tolerance,
        "seconds": found.seconds,
        "schedule": facts_of(found.plan.schedule),
        "stages": [asdict(stage) for stage in found.plan.stages],
        "memory": None if found.plan.memory is None else [asdict(rank) for rank in found.plan.memory.ranks],
        **{name: None if each is None else _compared(each) for name, each in comparisons.items()},
    }


def _compared(found: Comparison) -> dict[str, object]:
    return {
        "verdict": found.verdict if found.compared else "not compared",
        "note": found.note,
        "first": None if found.first is None else asdict(found.first),
        "unequal": {name: asdict(each) for name, each in found.all() if each.verdict != "equal"},  # in some bit
    }
