"""The museum: each case is short, names its thread and has a row on its group's page. One case of each group runs."""

import os
import re
import subprocess
import sys

import pytest
import torch

from examples.museum import __main__ as museum
from examples.museum import museum as shared

CASES = {case.name: case for case in museum.cases()}
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
FIRST = (
    *("numbers/tied_weights", "hangs/fewer_microbatches", "memory/optimizer_in_backward", "compile/compiled_zero_bubble"),
    *("checkpoints/stateless_optimizer", "shapes/batch_in_the_second_dimension"),
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_complete(case: museum.Case) -> None:
    assert len(case.path.read_text().splitlines()) <= 60
    assert THREAD.fullmatch(case.url) and case.title.endswith(".") and case.situation
    page = (museum.DOCS / "museum" / f"{case.path.parent.name}.md").read_text()
    assert f"[{case.title}](../../examples/museum/{case.name}.py)" in page and f"]({case.url})" in page


def test_each_complaint_has_one_case() -> None:
    assert len({case.url for case in CASES.values()}) == len(CASES) >= 60


@pytest.mark.parametrize("names", [FIRST, pytest.param((), marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_cases_are_as_claimed(names: tuple[str, ...]) -> None:
    command = [sys.executable, museum.HERE, *names]  # which imports torch once for all
    environment = os.environ | {"PYTHONPATH": str(museum.DOCS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{len(names) or len(CASES)} cases, 0 not as claimed\n")


def test_a_wrong_number_of_ours_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.warnings, "simplefilter", lambda action: None)
    monkeypatch.setattr(shared.logging, "disable", lambda level: None)
    one = {"w": torch.ones(2)}
    two = {"w": 2 * one["w"]}
    with pytest.raises(SystemExit, match="1"):
        shared.show(lambda: shared.compare(one, two), lambda: shared.equal(one, two))
    theirs, ours = capsys.readouterr().out.splitlines()
    assert theirs == "theirs: wrong, silently: w differs from eager by 0.5 of its norm"
    assert ours == "ours: NOT AS CLAIMED: AssertionError: w differs by 0.5 of its norm"
