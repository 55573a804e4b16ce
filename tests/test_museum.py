"""The museum: each case is short, names its thread and has a row on its group's page. One case of each group runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.museum import __main__ as museum
from tests.exhaustive import cases

CASES = {case.name: case for case in museum.cases()}
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
FIRST = (
    *("numbers/tied_weights", "hangs/fewer_microbatches", "memory/optimizer_in_backward", "compile/compiled_zero_bubble"),
    *("checkpoints/stateless_optimizer", "shapes/batch_in_the_second_dimension"),
)


def run(script: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{museum.DOCS.parent}:{museum.HERE}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_complete(case: museum.Case) -> None:
    assert len(case.path.read_text().splitlines()) <= 60
    assert THREAD.fullmatch(case.url) and case.title.endswith(".") and case.situation
    page = (museum.DOCS / "museum" / f"{case.path.parent.name}.md").read_text()
    assert f"[{case.title}](../../examples/museum/{case.name}.py)" in page and f"]({case.url})" in page


def test_each_complaint_has_one_case() -> None:
    assert len({case.url for case in CASES.values()}) == len(CASES) >= 60


@pytest.mark.parametrize("name", cases(CASES, *FIRST))
def test_a_case_is_as_claimed(name: str) -> None:
    done = run(CASES[name].path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^theirs: .*\nours: ", done.stdout, re.MULTILINE)


def test_a_wrong_number_of_ours_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text("import torch, museum\none = {'w': torch.ones(2)}\n" + WRONG)
    done = run(script)
    assert done.returncode == 1
    assert done.stdout == "theirs: wrong, silently: w differs from eager by 0.5 of its norm\nours: NOT AS CLAIMED: " + SAID


WRONG = "two = {'w': 2 * one['w']}\nmuseum.show(lambda: museum.compare(one, two), lambda: museum.equal(one, two))\n"
SAID = "AssertionError: w differs by 0.5 of its norm\n"
