"""The commands that read what `graphpp plan` has written: `compare` two plans, and a page as the `report` of all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphpp.cli.command import Answer, add_command
from graphpp.cli.plan import written
from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    from graphpp.cluster_planner.plans.training_plan import TrainingPlan

_FILE_HELP = "The JSON of `graphpp plan --json`, or of its --save."


def add_to(root: typer.Typer) -> None:
    """Add the commands."""
    add_command(root, "compare")(compare)
    add_command(root, "report")(report)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="FILE[:NUMBER]", help=f"{_FILE_HELP} FILE:3 is its third plan, FILE alone the best one.")
    ],
    second: Annotated[str, typer.Argument(metavar="FILE[:NUMBER]", help="The same for the plan beside it.")],
) -> Answer:
    """Show two plans side by side: what they choose, and the differences of their seconds, bytes and bytes sent."""
    found = _plan(first).compare(_plan(second))
    return Answer(str(found), found.document())


def _plan(text: str) -> TrainingPlan:
    """A plan of a file. Raises `GraphPPError` for a number that the file does not have."""
    from graphpp.cluster_planner.plans.found_plans import TrainingPlans  # loads torch, which help pages need not

    numbered = re.fullmatch(r"(.+):([0-9]{1,9})", text)
    file, number = (numbered[1], int(numbered[2])) if numbered and not Path(text).exists() else (text, 1)
    plans = TrainingPlans.from_json(Path(file)).plans
    if not 1 <= number <= len(plans):
        raise GraphPPError(f"{text}: the file has plans 1 to {len(plans)}")
    return plans[number - 1]


def report(
    file: Annotated[Path, typer.Argument(help=_FILE_HELP)],
    output: Annotated[Path, typer.Option(help="The file of the page.")] = Path("report.html"),
) -> Answer:
    """Write a page of plans: time against bytes, each plan in full. The page needs no network."""
    from graphpp.cluster_planner.plans.found_plans import TrainingPlans  # loads torch, which help pages need not

    found = TrainingPlans.from_json(file)
    note = written("--output", output, found.to_html())
    return Answer(str(found.best), {"plans": len(found), "page": str(output)}, notes=[note])
