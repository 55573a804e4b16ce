"""What all commands share: `--json`, `--traceback`, exit codes, and a standard output that nobody else writes to."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from graphpp.cli.app import app
from graphpp.cli.command import Answer, add_command
from graphpp.errors import ScheduleError
from tests.cli.running import refusal, run


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups taken apart."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    else:
        for name, each in inner.items():
            yield from leaves(each, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


def test_the_commands() -> None:
    assert {" ".join(path) for path in COMMANDS} >= {
        "verify", "schedule show", "schedule check", "schedule simulate", "schedule compare",
        "cache list", "cache empty", "doctor",
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_the_common_options_and_help(path: tuple[str, ...]) -> None:
    options = {word for parameter in COMMANDS[path].params for word in parameter.opts}
    assert options >= {"--json", "--traceback"}
    described = [parameter for parameter in COMMANDS[path].params if getattr(parameter, "help", None)]
    assert len(described) == len(COMMANDS[path].params)
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Usage: graphpp" in result.stdout


@pytest.mark.parametrize("words", [("schedule", "show"), ("schedule", "compare"), ("verify",), ("report",)], ids=" ".join)
def test_a_name_that_no_file_can_have_is_refused(words: tuple[str, ...]) -> None:
    found = refusal(*words, "a" * 256)
    assert any(each in found for each in ("File name too long", "no such file", "no file of this name"))  # from 3.14 on, none


def invoke(function: Callable[..., Answer | None], *arguments: str) -> Result:
    """A command line of one function."""
    single = typer.Typer(pretty_exceptions_enable=False)
    add_command(single, "command")(function)
    return CliRunner().invoke(single, arguments)


def test_json_is_all_of_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    def command() -> Answer:
        print("from Python")
        os.write(1, b"from compiled code\n")
        return Answer("text", {"infinite": float("inf"), "nan": float("nan"), "pair": (1, None), "path": os.curdir})

    result = invoke(command, "--json")
    assert json.loads(result.stdout) == {"infinite": "inf", "nan": "nan", "pair": [1, None], "path": "."}
    assert result.stderr == "from Python\n"
    assert capfd.readouterr() == ("", "from compiled code\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"
    assert invoke(command).stdout == "from Python\ntext\n"


def test_an_error_of_graphpp() -> None:
    def command() -> Answer:
        raise ScheduleError("wrong\n  in two lines")

    plain = invoke(command)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert plain.stderr == "graphpp.errors.ScheduleError: wrong\n  in two lines\n"
    traced = invoke(command, "--traceback")
    assert traced.exit_code == 2
    assert traced.stderr.startswith("Traceback (most recent call last)")
    as_json = invoke(command, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout) == {"error": {"type": "ScheduleError", "message": "wrong\n  in two lines"}}
    assert as_json.stderr == plain.stderr


def test_of_several_ranks_the_first_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> Answer:
        raise ScheduleError("wrong")

    def answers() -> Answer:
        return Answer("text", {"a": 1}, yes=False)

    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        refused, answered = invoke(refuses, "--json"), invoke(answers)
        assert (refused.exit_code, answered.exit_code) == (2, 1)
        assert "wrong" in refused.stderr
        assert [bool(refused.stdout), bool(answered.stdout)] == [rank == "0"] * 2


def test_any_other_exception_is_a_defect_and_shows_its_traceback() -> None:
    def command() -> Answer:
        raise KeyError("defect")

    result = invoke(command)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "KeyError: 'defect'" in result.stderr


@pytest.mark.parametrize("arguments", ["nothing", "schedule shw", "verify", "schedule show --ranks x 1F1B"])
def test_wrong_usage(arguments: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: graphpp" in result.stderr
