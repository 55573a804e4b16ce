"""Every example of docs/command_line.md and docs/command_line/ runs, and prints what the page shows.

Contract: the blocks of a page run in order in one empty folder. A `python` block whose first line is `# NAME.py` is also
written to that file. In a `console` block a line `$ graphpp ..` is a command, and the lines up to the next one are its output,
in which `...` stands for any text; `(exit code N)` is the code, otherwise 0.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import document, run
from tests.cli.test_command import COMMANDS
from tests.cli.test_plan import CODE as PLANNED
from tests.exhaustive import cases

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "command_line.md", *sorted((DOCS / "command_line").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"\(exit code ([0-9]+)\)\n?$")


def commands(block: str) -> Iterator[tuple[str, str, int]]:
    """(command, output, exit code) of each command in a console block."""
    for text in re.split(r"^\$ graphpp ", block, flags=re.MULTILINE)[1:]:
        line, _, output = text.partition("\n")
        code = CODE.search(output)
        yield line, CODE.sub("", output), int(code[1]) if code else 0


def matches(shown: str, printed: str) -> bool:
    """Whether the output is as shown; `...` stands for any text."""
    pattern = ".*?".join(map(re.escape, shown.rstrip("\n").split("...")))
    return re.fullmatch(pattern, printed.rstrip("\n"), re.DOTALL) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    namespace: dict[str, Any] = {"__name__": "page"}
    for kind, block in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(compile(block, str(page), "exec"), namespace)
            name = re.match(r"# (\w+\.py)\n", block)
            if name:
                Path(name[1]).write_text(block)
        for line, output, code in commands(block) if kind == "console" else ():
            result = run(*shlex.split(line))
            assert result.exit_code == code, f"{line}\n{result.output}"
            assert matches(output, result.stdout), f"{line}\n{result.stdout}"


def test_the_pages_have_commands() -> None:
    assert sum(len(list(commands(block))) for page in PAGES for _, block in BLOCK.findall(page.read_text())) > 8


ROW = re.compile(r"^\| (`[a-z ]+`(?:, `[a-z ]+`)*) \| (.*) \|$", re.MULTILINE)
DOCUMENTED = {
    words: set(re.findall(r"`([a-z_]+)`", fields))
    for commands, fields in ROW.findall((DOCS / "command_line" / "json.md").read_text())
    for words in re.findall(r"`([a-z ]+)`", commands)
}
TABLE = "1F1B --ranks 2 --microbatches 2"
CALLS = {
    "plan": "plan planned.py:build --machines 2xH100 --batch 4",
    "compare": "compare plans.json plans.json",
    "report": "report plans.json",
    "verify": "verify model_of_the_page.py:build",
    "schedule show": f"schedule show {TABLE}",
    "schedule check": f"schedule check {TABLE}",
    "schedule simulate": f"schedule simulate {TABLE}",
    "schedule compare": f"schedule compare {TABLE}",
    "doctor": "doctor",
    "cache list": "cache list",
    "cache empty": "cache empty",
}
OTHER = {  # words of a row that are no field of this document
    "plan": {"message"}, "schedule check": {"message"}, "schedule compare": {"simulate"},
}  # fmt: skip


@pytest.mark.parametrize("words", cases(DOCUMENTED, "plan", "verify"))
def test_the_fields_of_each_document(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    blocks = BLOCK.findall((DOCS / "command_line" / "verify.md").read_text())
    Path("model_of_the_page.py").write_text(next(block for kind, block in blocks if kind == "python"))
    Path("planned.py").write_text(textwrap.dedent(PLANNED))
    if words in ("compare", "report"):
        run(*CALLS["plan"].split(), "--save", "plans.json")
    assert set(document(*CALLS[words].split())) == DOCUMENTED[words] - OTHER.get(words, set())


def test_every_command_has_a_row() -> None:
    assert set(DOCUMENTED) == set(CALLS) == {" ".join(path) for path in COMMANDS}


def test_matches() -> None:
    assert matches("a\n...\nz\n", "a\nb\nc\nz\n")
    assert not matches("a\n...\nz\n", "a\nb\nc\n")
    assert not matches("a.c", "abc")
