"""`graphpp doctor`: the facts of this machine, and under torchrun the links between the ranks.

Contract: rank 0 prints. The answer is no (exit code 1) where graphpp cannot run: a torch that it does not support, or a
required library that is not installed. A missing compiler is a remark, for only compiled backends need one.
"""

from __future__ import annotations

from typing import Annotated

import typer

from graphpp.cli.command import Answer, add_command
from graphpp.cli.forms import read_bytes


def add_to(root: typer.Typer) -> None:
    """Add the command."""
    add_command(root, "doctor")(doctor)


def doctor(
    size: Annotated[str, typer.Option(help="Bytes of the large message between ranks.")] = "16MiB",
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Messages over each link.")] = 20,
) -> Answer | None:
    """Print what this machine and its PyTorch can do. Under torchrun (-m graphpp doctor) measure the links between ranks."""
    from graphpp.cli.doctor.answer import answer  # loads torch, which help pages need not

    return answer(read_bytes("--size", size), repeats)
