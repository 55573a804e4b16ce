"""The root of the command line, its groups, and the entry point of the script `graphpp`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from graphpp.cli import cache, doctor, plan, schedule, verify

app = typer.Typer(
    name="graphpp",
    help="Pipeline parallelism for an unmodified PyTorch model: check a model, a schedule, a machine.",
    epilog="Exit codes: 0 yes, 1 no (a difference, a refused schedule, no plan), 2 wrong usage or an error, 130 after Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `command.py` prints exceptions
    context_settings={"help_option_names": ["-h", "--help"]},
)
for each in (plan, verify, schedule, cache, doctor):  # in the order of the help page
    each.add_to(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"graphpp {sys.modules['graphpp'].__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version of graphpp, and end.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Read the options of the command itself."""


def main() -> None:
    app(prog_name="graphpp")
