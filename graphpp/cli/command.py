"""How every command takes `--json` and `--traceback`, prints its answer, and exits.

- A command is a function that returns an `Answer`, or None if another rank prints it. Exit codes: `YES`, `NO`, and `ERROR` for
  wrong usage (by typer) and exceptions. A `GraphPPError`, or an error of a file, is printed without its traceback unless asked
  for; any other exception is a defect, printed with its traceback. Under torchrun only rank 0 prints its answer; all ranks
  print errors.
- With `--json` standard output gets exactly one JSON document: the answer, or `{"error": ..}`. Other output goes to standard
  error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpp.errors import GraphPPError

YES, NO, ERROR = 0, 1, 2


@dataclass(frozen=True)
class Answer:
    """The result of a command: text for people, and data for `--json`.

    `yes`: False makes the exit code `NO`. `notes`: lines for standard error, such as names of written files.
    """

    text: str
    document: Mapping[str, object]
    yes: bool = True
    notes: Sequence[str] = ()


Command = Callable[..., Answer | None]
_OPTIONS = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")],
    "with_traceback": Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")],
}


def add_command(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    """A decorator that registers a function with typer under `name` and returns it unchanged."""

    def add(function: Command) -> Command:
        app.command(name)(_ending(function))
        return function

    return add


def _ending(function: Command) -> Callable[..., None]:
    """The function with the two added options, which prints the answer and raises `typer.Exit`."""

    @functools.wraps(function)
    def run(*, as_json: bool, with_traceback: bool, **given: Any) -> None:
        with _kept_output() if as_json else contextlib.nullcontext():
            answer, error = _attempt(function, given, with_traceback)
        if os.environ.get("RANK", "0") == "0":
            _print(answer, error, as_json)
        raise typer.Exit(ERROR if error is not None else YES if answer is None or answer.yes else NO)

    signature = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for each, annotation in _OPTIONS.items()
    ]
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*own, *added], return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return run


def _attempt(function: Command, given: Mapping[str, Any], with_traceback: bool) -> tuple[Answer | None, Exception | None]:
    """The answer of a command, or its exception, which is printed to standard error."""
    try:
        return function(**given), None
    except Exception as fault:
        error = fault
        if isinstance(fault, OSError) and fault.filename is not None:
            error = GraphPPError(f"{fault.filename}: {fault.strerror}")
            error.__cause__ = fault
        if with_traceback or not isinstance(error, GraphPPError):
            lines = traceback.format_exception(error)
        else:
            lines = traceback.format_exception_only(error)
        typer.echo("".join(lines).rstrip(), err=True)
        return None, error


def _print(answer: Answer | None, error: Exception | None, as_json: bool) -> None:
    """Print the answer, or the error as JSON, to standard output, and notes to standard error."""
    if error is not None and as_json:
        typer.echo(_json({"error": {"type": type(error).__name__, "message": str(error)}}))
    if answer is not None:
        typer.echo(_json(answer.document) if as_json else answer.text)
        for note in answer.notes:
            typer.echo(note, err=True)


def write_text(file: Path, text: str) -> str:
    """Write a file; returns a note about it. Raises `GraphPPError` if it cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as fault:  # ValueError: an impossible path
        raise GraphPPError(f"{file} cannot be written: {getattr(fault, 'strerror', None) or fault}") from fault
    return f"wrote {file}"


@contextlib.contextmanager
def _kept_output() -> Iterator[None]:
    """Redirect standard output to standard error, for Python and for compiled code such as gloo."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError):  # a process may have no standard output
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        yield


def _json(document: Mapping[str, object]) -> str:
    return json.dumps(_plain(document), indent=1, allow_nan=False)


def _plain(value: object) -> object:
    """The value as JSON data; infinite numbers and NaN become the strings `inf`, `-inf`, `nan`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)
