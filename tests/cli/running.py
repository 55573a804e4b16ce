"""Run the command line within the process of the test."""

import json
import textwrap
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from graphpp.cli.app import app


def run(*arguments: str | Path) -> Result:
    """What `graphpp ARGUMENTS` prints, and its exit code; `stdout` and `stderr` apart."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], prog_name="graphpp")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document(*arguments: str | Path, code: int = 0) -> Any:
    """The JSON document of `graphpp ARGUMENTS --json`, which must end with `code`."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    """The error of a command that must end with code 2, print nothing to standard output, and show no traceback."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def write(path: Path, text: str) -> Path:
    """The file, with the text without its indentation."""
    path.write_text(textwrap.dedent(text))
    return path
