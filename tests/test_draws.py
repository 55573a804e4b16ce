"""Random tests draw the same examples in every run, whatever other tests have imported before them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[int]:
    """The numbers that a random test draws."""
    found: list[int] = []

    @given(st.lists(st.integers(0, 10**6), min_size=50, max_size=50))
    def draw(numbers: list[int]) -> None:
        found.extend(numbers)

    draw()
    return found


def test_numbers_in_modules_that_are_loaded_later_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    folder = tmp_path.parent / "loaded"  # the name of this test's own folder begins like a test's, whose modules never count
    folder.mkdir(exist_ok=True)
    numbers = ", ".join(str(number) for number in range(7_000, 7_500))
    (folder / "loaded_later.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("loaded_later")
    assert drawn() == before
