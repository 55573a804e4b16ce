"""`graphpp report FILE`: a page of the plans that `graphpp plan` has written, to look at in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpp.cli.command import Answer, add_command
from graphpp.cli.plan import written


def add_to(root: typer.Typer) -> None:
    """Add the command."""
    add_command(root, "report")(report)


def report(
    file: Annotated[Path, typer.Argument(help="The JSON of `graphpp plan --json`, or of its --save.")],
    output: Annotated[Path, typer.Option(help="The file of the page.")] = Path("report.html"),
) -> Answer:
    """Write a page of plans: time against bytes, each plan in full. The page needs no network."""
    from graphpp.planner.plans.found_plans import TrainingPlans  # loads torch, which help pages need not

    found = TrainingPlans.from_json(file)
    note = written("--output", output, found.to_html())
    return Answer(str(found.best), {"plans": len(found), "page": str(output)}, notes=[note])
