"""The four pages of "The compiler in an hour": the files that README's first example runs, functions, the number of lines.

One run of the example under `coverage` serves all tests. A line counts if it is in a function's body: an import runs the lines
that define functions in every file that it loads, and these say nothing about the example.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_documents import ROOT, blocks

PARTS = ("compiler_in_an_hour", *(f"compiler_in_an_hour/{part}" for part in ("capture", "programs", "step")))
PAGE = "".join((ROOT / f"docs/{part}.md").read_text() for part in PARTS)
WALK, _, NOT_RUN = PAGE.partition("\n## What the example does not run\n")
NUMBERS = re.compile(r"([\d,]+) lines of functions run, in\s(\d+) files")
FILES = re.compile(r"`([\w/]+\.py)`")
FUNCTIONS = re.compile(r"^\*\*`([\w/]+\.py)`\*\*, ((?:`[\w.]+`(?:,\s)?)+)\.", re.MULTILINE)
MOST_LINES = 6_000  # what an engineer reads in an hour
NAMED_FROM = 12  # executed lines of a file that the page must name
PROGRAM = """
import json, sys
import coverage
watched = coverage.Coverage(source=["graphpp"], data_file=None)
watched.start()
exec(compile(sys.stdin.read(), "train.py", "exec"), {"__name__": "__main__"})
watched.stop()
found = watched.get_data()
print(json.dumps({file: found.lines(file) for file in found.measured_files()}))
"""


def lines_of_functions(file: Path) -> set[int]:
    """The lines of all function bodies; a body on the line of its `def` has none."""
    functions = [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.FunctionDef)]
    spans = [range(max(each.body[0].lineno, each.lineno + 1), (each.end_lineno or 0) + 1) for each in functions]
    return set().union(*spans)


@pytest.fixture(scope="module")
def executed() -> dict[str, int]:
    """How many lines of functions the example runs in each file, by the file's path below graphpp/."""
    _, example = blocks((ROOT / "README.md").read_text())[0]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, input=example, capture_output=True, text=True, check=True)
    lines = {Path(file): set(at) for file, at in json.loads(done.stdout.splitlines()[-1]).items()}
    counts = {str(file.relative_to(ROOT / "graphpp")): len(at & lines_of_functions(file)) for file, at in lines.items()}
    return {file: count for file, count in counts.items() if count}


def test_the_example_runs_few_lines(executed: dict[str, int]) -> None:
    assert sum(executed.values()) <= MOST_LINES


def test_the_page_says_how_many(executed: dict[str, int]) -> None:
    printed = NUMBERS.search(PAGE)
    assert printed is not None
    lines, files = (int(number.replace(",", "")) for number in printed.groups())
    assert lines == pytest.approx(sum(executed.values()), rel=0.05)
    assert files == pytest.approx(len(executed), rel=0.05)


def test_the_page_names_the_files_that_run_and_no_others(executed: dict[str, int]) -> None:
    named = set(FILES.findall(WALK))
    assert sorted(file for file, count in executed.items() if count >= NAMED_FROM and file not in named) == []
    assert sorted(named - executed.keys()) == []


def test_files_that_do_not_run_exist() -> None:
    named = FILES.findall(NOT_RUN)
    assert named
    assert [file for file in named if not (ROOT / "graphpp" / file).exists()] == []


def test_named_functions_and_classes_stand_in_their_files() -> None:
    paragraphs, wrong = FUNCTIONS.findall(WALK), []
    assert len(paragraphs) == WALK.count("\n**`")
    for file, names in paragraphs:
        tree = ast.walk(ast.parse((ROOT / "graphpp" / file).read_text()))
        defined = {each.name for each in tree if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        named = re.findall(r"\w+", names)  # `A.b` names both
        wrong += [f"{file}: {name}" for name in named if name not in defined]
    assert wrong == []
