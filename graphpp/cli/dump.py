"""`graphpp dump diff A B`: what changed between two dumps of graphs, for instance of two ranks or of two options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpp.cli.command import Answer, add_command
from graphpp.cli.dump_diff import diff_dumps


def add_to(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Read the dumps of graphs that debug= and GRAPHPP_DUMP write.")
    root.add_typer(group, name="dump")
    add_command(group, "diff")(diff)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A dump, or a folder in it such as dump/rank0/train.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same folder of another dump.")],
    context: Annotated[int, typer.Option(min=0, help="Lines around each change.")] = 3,
) -> Answer:
    """Compare two dumps file by file. Exit code 1 where they differ; times of passes do not count."""
    found = diff_dumps(first, second, context)
    document = {
        "same": found.same,
        "only_in_a": found.alone[0],
        "only_in_b": found.alone[1],
        "changed": found.changed,
        "equal": found.equal,
        "versions": found.versions,
    }
    return Answer(str(found), document, found.same)
