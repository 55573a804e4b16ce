"""CPU seconds of tests: those of ranks count, and a folder above its budget is named, on a machine of any speed."""

import json
import time
from pathlib import Path

import pytest

from tests.cpu_seconds import MARGIN, REFERENCE, SLACK, folder, over_budget, per_folder
from tests.distributed import cpu_seconds, run_ranks


def compute(rank: int, seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_seconds_of_ranks_count() -> None:
    run_ranks(compute, 2, 0.0)  # starts the ranks
    before = cpu_seconds()
    run_ranks(compute, 2, 0.25)
    assert cpu_seconds() - before > 0.5


@pytest.mark.parametrize(
    ("file", "expected"), [("tests/test_a.py", "tests"), ("tests/a/test_b.py", "tests/a"), ("tests/a/b/test_c.py", "tests/a")]
)
def test_a_folder_has_its_subfolders(file: str, expected: str) -> None:
    assert folder(f"{file}::test_d[e/f]") == expected
    assert per_folder({f"{file}::one": 1.0, f"{file}::two": 2.0}) == {expected: 3.0}


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_a_folder_above_its_budget_is_named_whatever_the_machine(speed: float) -> None:
    budgets = {REFERENCE: 2.0, "tests/a": 10.0}
    most = 10.0 * speed * MARGIN + SLACK
    assert over_budget({"tests/a": most, "tests/new": SLACK}, budgets, 2.0 * speed) == []
    (line,) = over_budget({"tests/a": most + 0.1}, budgets, 2.0 * speed)
    assert line.startswith("tests/a: ")
    assert len(over_budget({"tests/a": most, "tests/new": SLACK + 0.1}, budgets, 2.0 * speed)) == 1


def test_every_folder_of_tests_has_a_budget() -> None:
    root = Path(__file__).parent
    folders = {folder(str(path.relative_to(root.parent))) for path in root.rglob("test_*.py")}
    assert set(json.loads((root / "cpu_seconds.json").read_text())) == {REFERENCE, *folders}
